"""The names that a manifest may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from reprise.errors import CheckpointError
from reprise.format.manifest import BLOCK_BYTES
from reprise.format.names import MANIFEST, MANIFEST_FORMAT
from reprise.storage import json_file
from reprise.stores.checkpoint_files import CheckpointFiles
from tests.messages import refused


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a/..", "a\\b", ""])
def test_a_name_outside_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    table = {"format": MANIFEST_FORMAT, "attempt": "a", "block_bytes": BLOCK_BYTES, "tensors": {}, "aliases": {}}
    data = json_file.sealed({**table, "files": {name: {"bytes": 1, "xxh3_64": "0"}}})
    (tmp_path / MANIFEST).write_bytes(data)
    with refused(CheckpointError, str(tmp_path)):
        CheckpointFiles.at(tmp_path)
