"""`reprise.gather` and its command: one whole checkpoint of the folders of hosts, or a refusal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from reprise import gather, verify
from reprise.errors import CheckpointError
from reprise.storage.files import Files
from tests.harness import all_files
from tests.local_folders import flip, save_on_two_hosts, save_shared
from tests.messages import Printed, refused
from trainer.commands.checkpoint import FINE, IMPOSSIBLE, main

NAME = "iter_0000002"


def test_the_result_equals_a_save_into_a_shared_folder(tmp_path: Path, capsys: Printed) -> None:
    (a, b), shared = save_on_two_hosts(tmp_path, 2), save_shared(tmp_path / "shared", 2)
    out, new = tmp_path / "out", tmp_path / "new" / "out"
    counts: list[tuple[str, int, int]] = []
    report = gather([a, str(b)], out, progress=lambda *call: counts.append(call))
    assert main(["gather", str(a), str(b), str(new), "--json"]) == FINE
    printed = json.loads(capsys.readouterr().out)
    for folder in (out, new):
        assert all_files(folder) | {"lock": b""} == all_files(shared.parent) | {"lock": b""}
    assert (report.path, report.iteration, report.damage) == (out / NAME, 2, ())
    sources = [(str(source.path), source.copied_bytes) for source in report.sources]
    assert [(row["from"], row["bytes"]) for row in printed["sources"]] == sources
    assert [name for name, _ in sources] == [str(a / NAME), str(b / NAME)]
    assert sum(size for _, size in sources) == printed["bytes"] == report.total_bytes == 16420
    assert (counts[0], counts[-1]) == ((NAME, 0, 16420), (NAME, 16420, 16420))
    assert [result.status for result in verify(out)] == ["whole"]
    refusals = {
        (a, b, out): out / NAME,
        (a, b, a): a,
        (a, tmp_path / "nowhere", out): tmp_path / "nowhere",
        (shared.parent, tmp_path / "third"): "no part of it",
    }
    for folders, named in refusals.items():
        assert main(["gather", *map(str, folders)]) == IMPOSSIBLE
        assert str(named) in capsys.readouterr().err


def test_missing_pieces_are_named_by_the_host_that_wrote_them(tmp_path: Path) -> None:
    a, b = save_on_two_hosts(tmp_path, 2, 4)
    shutil.rmtree(b / "iter_0000004")
    out = tmp_path / "out"
    for folders, iteration in (((a, b), 4), ((a / "iter_0000004", b / NAME), None)):
        with refused(CheckpointError, "1 of 2 parts: "):
            gather(folders, out, iteration=iteration)
    assert not out.exists()
    assert gather([a, b], out).path == out / NAME


@pytest.mark.parametrize("damage", ["own", "of the other", "header", "folder"])
def test_damage_is_read_from_a_copy_or_refused(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
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
    report = gather([a, b], tmp_path / "out")
    assert all_files(report.path) == all_files(save_shared(tmp_path / "shared", 2))
    if damage not in ("header", "folder"):
        assert [str(a / NAME / "model.safetensors, tensor") in text for text in report.damage] == [True]
        assert main(["gather", str(a), str(b), str(tmp_path / "third")]) == FINE
        assert f"{a / NAME}/" in caplog.text
        flip(b / NAME, of_host=whose)
        with pytest.raises(CheckpointError):
            gather([a, b], tmp_path / "other")
        assert [path.name for path in (tmp_path / "other").iterdir()] == ["lock"]


def test_a_killed_call_leaves_no_checkpoint_and_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = save_on_two_hosts(tmp_path, 2)
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(Files, "remove", lambda *_: None)
        patched.setattr(Files, "rename", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        assert main(["gather", str(a), str(b), str(out)]) == IMPOSSIBLE
    assert [path.name.startswith(f".{NAME}.gather-") for path in out.iterdir() if path.is_dir()] == [True]
    (copied := out / ".iter_0000009.abc.copy.partial").mkdir()  # by a copy under way, which takes no lock
    assert main(["gather", str(a), str(b), str(out)]) == FINE
    names = [copied.name, NAME, "latest_checkpointed_iteration.txt", "lock"]
    assert sorted(path.name for path in out.iterdir()) == names
