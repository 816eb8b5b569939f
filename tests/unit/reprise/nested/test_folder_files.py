"""Files for other programs in the folder of a save, and folders that `from_pretrained` opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reprise import AsyncSaver, save, save_state_dict
from reprise.errors import CheckpointError
from reprise.loading.reader import open_checkpoint
from reprise.nested import folder_files as module
from reprise.storage.files import Files
from tests.messages import refused


def test_files_of_every_kind_lie_in_the_folder(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"\x00\xff")
    files = {"config.json": {"width": 3}, "labels.json": ["a"], "note.txt": "text", "raw": b"\x01", "copy": source}
    expected = [b'{\n  "width": 3\n}\n', b'[\n  "a"\n]\n', b"text", b"\x01", b"\x00\xff"]
    with AsyncSaver(tmp_path / "c") as saver:
        saver.save(1, nn.Linear(2, 2), files=files)
        saver.save_state_dict(2, {"a": torch.ones(1)}, files=files)
    paths = [
        tmp_path / "c" / "iter_0000001",
        tmp_path / "c" / "iter_0000002",
        save(tmp_path / "a", nn.Linear(2, 2), iteration=1, files=files),
        save_state_dict(tmp_path / "b", {"a": torch.ones(1)}, iteration=1, files=files),
    ]
    for path in paths:
        assert [(path / name).read_bytes() for name in files] == expected
        assert open_checkpoint(path, Files()).manifest.files.keys() >= files.keys()


NAMES = ["manifest.json", "trainer_state.json", "model-1.safetensors", "a/b", "..", ".x", "", "hold", "optimizer", 3]


@pytest.mark.parametrize("name", [*NAMES, "é" * 128])
def test_names_of_the_checkpoint_itself_are_refused(tmp_path: Path, name: Any) -> None:
    with refused(CheckpointError, "`files`"):
        save(tmp_path, nn.Linear(2, 2), iteration=1, files={name: b""})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "problem"),
    [(3, "int"), ({"a": torch.ones(1)}, "JSON"), (Path("/none/x"), "/none/x")],
)
def test_content_that_is_no_file_is_refused_by_name(tmp_path: Path, content: object, problem: str) -> None:
    with refused(CheckpointError, problem):
        save(tmp_path, nn.Linear(2, 2), iteration=1, files={"x": content})


def test_a_file_beyond_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.json_file, "MAX_BYTES", 3)
    with refused(CheckpointError, "(`files`, x)", "3 B", "4 B"):
        module.folder_files({"x": b"1234"})
