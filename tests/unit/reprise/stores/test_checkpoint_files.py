"""The names that a manifest may have, and the files that it must have."""

from __future__ import annotations

from pathlib import Path

import pytest

from reprise.errors import CheckpointError
from reprise.format.manifest import BLOCK_BYTES
from reprise.format.names import MANIFEST, MANIFEST_FORMAT
from reprise.storage import json_file
from reprise.stores.checkpoint_files import CheckpointFiles
from tests.messages import refused
from tests.stores.saving import save


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a/..", "a\\b", ""])
def test_a_name_outside_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    table = {"format": MANIFEST_FORMAT, "attempt": "a", "block_bytes": BLOCK_BYTES, "tensors": {}, "aliases": {}}
    data = json_file.sealed({**table, "files": {name: {"bytes": 1, "xxh3_64": "0"}}})
    (tmp_path / MANIFEST).write_bytes(data)
    with refused(CheckpointError, str(tmp_path)):
        CheckpointFiles.at(tmp_path)


@pytest.mark.parametrize("kind", ["missing", "short", "link"])
def test_a_file_that_is_not_whole_is_refused(kind: str, tmp_path: Path) -> None:
    save(tmp_path, [5])
    file = tmp_path / "iter_0000005" / "model-00001-of-00003.safetensors"
    content = file.read_bytes()
    file.unlink()
    if kind == "short":
        file.write_bytes(content[:-1])
    elif kind == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="wrong size") as caught:
        CheckpointFiles.at(file.parent)
    assert caught.value.where == file
