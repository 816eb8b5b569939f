"""Hosts that see different folders under one path: nothing is saved, loaded or trained from such a mixture."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.crash.hosts import Mount, on_hosts
from tests.harness import call_on_ranks

pytestmark = pytest.mark.slow


def show_folders(arguments: list[str]) -> None:
    """Print what a rank sees, and write a file into each folder."""
    for folder in map(Path, arguments):
        print(os.environ["LOCAL_RANK"], socket.gethostname(), sorted(path.name for path in folder.iterdir()))
        (folder / f"of{os.environ['RANK']}").touch()


def test_a_host_of_its_own_sees_and_changes_what_is_mounted_there(tmp_path: Path) -> None:
    shared, other, empty = (tmp_path / name for name in ("shared", "other", "empty"))
    for folder in (shared, other, empty):
        folder.mkdir()
        (folder / f"in_{folder.name}").touch()
    ranks = on_hosts(show_folders, {1: [Mount(shared, other), Mount(empty)]})
    ended = call_on_ranks(ranks, [str(shared), str(empty)], folder=tmp_path / "run", ranks=2)
    assert ended.ok, ended.text
    assert ended.outputs[0].splitlines() == ["0 host0 ['in_shared']", "0 host0 ['in_empty']"]
    assert ended.outputs[1].splitlines() == ["0 host1 ['in_other']", "0 host1 []"]
    found = {folder.name: sorted(path.name for path in folder.iterdir()) for folder in (shared, other, empty)}
    assert found == {
        "shared": ["in_shared", "of0"],
        "other": ["in_other", "of1"],
        "empty": ["in_empty", "of0"],
    }
