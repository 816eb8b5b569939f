"""The division of a checkpoint's files among hosts, and the names that a manifest may have."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from reprise.errors import CheckpointError
from reprise.format.names import MANIFEST, MANIFEST_FORMAT
from reprise.storage import json_file
from reprise.stores.checkpoint_files import CheckpointFiles, share
from tests.messages import refused


@pytest.mark.parametrize("hosts", [1, 2, 3, 7, 64])
def test_hosts_have_equal_shares_of_many_files(hosts: int) -> None:
    draw = random.Random(hosts)
    for files in (5 * hosts, 9 * hosts + 1):
        full = {f"model-{number}": 2 << 30 for number in range(files)}
        sizes = full | {"model-last": draw.randrange(2 << 30), "trainer_state.json": 9000, "optimizer/x": 12 << 20}
        parts = [share(sizes, host, hosts) for host in range(hosts)]
        assert parts[-1] == share(dict(reversed(sizes.items())), hosts - 1, hosts)
        assert sorted(name for part in parts for name in part) == sorted(sizes)
        loads = [sum(sizes[name] for name in part) for part in parts]
        assert max(loads) <= 1.2 * sum(loads) / hosts


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a/..", "a\\b", ""])
def test_a_name_outside_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    data = json_file.sealed({"format": MANIFEST_FORMAT, "files": {name: {"bytes": 1}}})
    (tmp_path / MANIFEST).write_bytes(data)
    with refused(CheckpointError, str(tmp_path)):
        CheckpointFiles.at(tmp_path)
