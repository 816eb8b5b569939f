"""The command that joins the folders of hosts: equal to a shared save, or a refusal that names the missing pieces."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from reprise.storage import Files
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
    refusals = {
        (a, b, out): out / NAME,
        (a, b, a): a,
        (a, tmp_path / "nowhere", out): tmp_path / "nowhere",
        (tmp_path / "shared", tmp_path / "third"): "no part of it",
    }
    for folders, named in refusals.items():
        assert main(["gather", *map(str, folders)]) == IMPOSSIBLE
        assert str(named) in capsys.readouterr().err


def test_missing_pieces_are_named_by_the_host_that_wrote_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = save_on_two_hosts(tmp_path, 2, 4)
    shutil.rmtree(b / "iter_0000004")
    out = tmp_path / "out"
    assert main(["gather", str(a), str(b), str(out), "--iteration", "4"]) == IMPOSSIBLE
    assert "iteration 4 lacks 1 of 2 parts: " in capsys.readouterr().err
    assert main(["gather", str(a / "iter_0000004"), str(b / NAME), str(out)]) == IMPOSSIBLE
    assert not out.exists()
    assert main(["gather", str(a), str(b), str(out)]) == FINE
    assert (out / NAME).is_dir()


@pytest.mark.parametrize("damage", ["own", "of the other", "header", "folder"])
def test_damage_is_read_from_a_copy_or_refused(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    a, b = save_on_two_hosts(tmp_path, 2, copies=1)
    whose = int(damage == "of the other")
    match damage:
        case "header":
            with (a / NAME / "model.safetensors").open("r+b") as file:
                file.write(b"\xff")
        case "folder":
            (a / NAME / "host.json").write_text("{}")
        case _:
            flip(a / NAME, of_host=whose)
    assert main(["gather", str(a), str(b), str(tmp_path / "out")]) == FINE
    assert all_files(tmp_path / "out" / NAME) == all_files(save_shared(tmp_path / "shared", 2))
    if damage not in ("header", "folder"):
        assert f"{a / NAME}/" in caplog.text
        flip(b / NAME, of_host=whose)
        assert main(["gather", str(a), str(b), str(tmp_path / "other")]) == IMPOSSIBLE
        assert [path.name for path in (tmp_path / "other").iterdir()] == ["lock"]


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
