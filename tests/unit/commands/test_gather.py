"""The command that joins the folders of hosts: equal to a shared save, or a refusal that names the missing pieces."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from reprise.files import Files
from tests.harness import all_files
from tests.local_folders import flip, save_on_two_hosts, save_shared
from trainer.commands.checkpoint import FINE, IMPOSSIBLE, main

NAME = "iter_0000002"


def test_the_result_equals_a_save_into_a_shared_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = save_on_two_hosts(tmp_path, 2)
    shared, out = save_shared(tmp_path / "shared", 2), tmp_path / "new" / "out"
    assert main(["gather", str(a), str(b), str(out), "--json"]) == FINE
    found = json.loads(capsys.readouterr().out)
    assert [row["from"] for row in found["sources"]] == [str(a / NAME), str(b / NAME)]
    assert sum(row["bytes"] for row in found["sources"]) == found["bytes"] == 16420
    assert all_files(out / NAME) == all_files(shared)
    assert all_files(out) | {"lock": b""} == all_files(tmp_path / "shared") | {"lock": b""}
    assert main(["verify", str(out)]) == FINE
    assert main(["gather", str(a), str(b), str(out)]) == IMPOSSIBLE
    assert f"There is something already ({out / NAME})" in capsys.readouterr().err


def test_missing_pieces_are_named_by_the_host_that_wrote_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = save_on_two_hosts(tmp_path, 2, 4)
    shutil.rmtree(b / "iter_0000004")
    out = tmp_path / "out"
    assert main(["gather", str(a), str(b), str(out), "--iteration", "4"]) == IMPOSSIBLE
    found = capsys.readouterr().err
    assert "Iteration 4 is not whole in these folders together, found iteration 4 lacks 3 of 3 pieces of host" in found
    assert not out.exists()
    assert main(["gather", str(a / "iter_0000004"), str(b / NAME), str(out)]) == IMPOSSIBLE
    assert "No checkpoint is whole in these folders together" in capsys.readouterr().err
    assert main(["gather", str(a), str(b), str(out)]) == FINE
    assert (out / NAME).is_dir()


@pytest.mark.parametrize("whose", [0, 1])
def test_damage_is_read_from_a_copy_or_refused(
    tmp_path: Path, whose: int, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    a, b = save_on_two_hosts(tmp_path, 2, copies=1)
    shared, out = save_shared(tmp_path / "shared", 2), tmp_path / "out"
    flip(a / NAME, of_host=whose)
    assert main(["gather", str(a), str(b), str(out)]) == FINE
    assert f"damaged, and taken from another folder: {a / NAME}/" in caplog.text
    assert all_files(out / NAME) == all_files(shared)
    flip(b / NAME, of_host=whose)
    assert main(["gather", str(a), str(b), str(tmp_path / "other")]) == IMPOSSIBLE
    assert "A part of a tensor is damaged in every folder that holds it" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["lock"]


def test_a_damaged_folder_is_left_out_and_a_bad_header_replaced(tmp_path: Path) -> None:
    a, b = save_on_two_hosts(tmp_path, 2, copies=1)
    shared = save_shared(tmp_path / "shared", 2)
    with (a / NAME / "model.safetensors").open("r+b") as file:
        file.write(b"\xff")
    assert main(["gather", str(a), str(b), str(tmp_path / "out")]) == FINE
    (a / NAME / "host.json").write_text("{}")
    assert main(["gather", str(a), str(b), str(tmp_path / "out2")]) == FINE
    for out in ("out", "out2"):
        assert all_files(tmp_path / out / NAME) == all_files(shared)


def test_a_killed_call_leaves_no_checkpoint_and_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = save_on_two_hosts(tmp_path, 2)
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(Files, "remove_tree", lambda *_: None)
        patched.setattr(Files, "rename", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        assert main(["gather", str(a), str(b), str(out)]) == IMPOSSIBLE
    assert [path.name.startswith(f".{NAME}.gather-") for path in out.iterdir() if path.is_dir()] == [True]
    assert main(["gather", str(a), str(b), str(out)]) == FINE
    assert sorted(path.name for path in out.iterdir()) == [NAME, "latest_checkpointed_iteration.txt", "lock"]


def test_a_folder_of_a_host_is_no_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = save_on_two_hosts(tmp_path, 2)
    assert main(["gather", str(a), str(b), str(a)]) == IMPOSSIBLE
    assert "The output is the folder of a host" in capsys.readouterr().err
    assert main(["gather", str(a), str(tmp_path / "nowhere"), str(tmp_path / "out")]) == IMPOSSIBLE
    assert "There is no such folder" in capsys.readouterr().err
    shared = save_shared(tmp_path / "shared", 2)
    assert main(["gather", str(shared), str(tmp_path / "out")]) == IMPOSSIBLE
    assert "A checkpoint is not that of one host" in capsys.readouterr().err
