"""`reprise.list`: what each checkpoint of a folder is, without reading its tensors."""

from __future__ import annotations

import time
from pathlib import Path

import torch

import reprise
from reprise import CheckpointStatus
from reprise.errors import CheckpointError
from tests.local_folders import save_on_two_hosts
from tests.messages import refused


def save(folder: Path, *iterations: int) -> Path:
    for iteration in iterations:
        reprise.save(folder, torch.nn.Linear(3, 2), iteration=iteration, state={"epoch": iteration})
    return folder


def test_checkpoints_are_listed_in_order_with_their_state(tmp_path: Path) -> None:
    folder = save(tmp_path / "run" / "checkpoints", 5, 10)
    (folder / "iter_0000005" / "hold").touch()
    for argument in (folder, folder.parent, str(folder)):
        first, newest = reprise.list(argument)
        assert (first.iteration, first.is_pinned, newest.iteration, newest.is_pinned) == (5, True, 10, False)
        assert (newest.folder, newest.path) == (folder, folder / "iter_0000010")
        assert (newest.status, newest.problem) == (CheckpointStatus.WHOLE, None)
        assert newest.state is not None
        assert newest.state["state_dict"]["values"] == {"/epoch": 10}
        assert newest.total_bytes == sum(file.stat().st_size for file in newest.path.rglob("*"))
        assert 0 <= time.time() - newest.written_at < 60


def test_damaged_linked_and_superseded_checkpoints_differ(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, 2, 3)
    (folder / "iter_0000001" / "trainer_state.json").write_text("{}")
    (folder / "iter_0000002").rename(folder / "iter_0000002.superseded-1")
    (folder / "iter_0000004").symlink_to(folder / "iter_0000003")
    damaged, superseded, whole, link = reprise.list(folder)
    assert (damaged.status, damaged.state) == (CheckpointStatus.DAMAGED, None)
    assert "trainer_state.json" in str(damaged.problem)
    assert (superseded.is_superseded, superseded.iteration, superseded.status) == (True, 2, "whole")
    assert (whole.is_superseded, whole.is_link, link.is_link, link.status) == (False, False, True, "damaged")


def test_the_folder_of_a_host_has_its_share(tmp_path: Path) -> None:
    a, b = save_on_two_hosts(tmp_path, 2)
    (alone,) = reprise.list(a)
    assert (alone.status, alone.missing_everywhere) == (CheckpointStatus.PART, None)
    assert alone.share is not None
    assert [(host.pieces, host.present) for host in alone.share.hosts] == [(3, 3), (3, 0)]
    assert 0 < alone.share.present_bytes < alone.share.total_bytes
    assert [summary.missing_everywhere for summary in reprise.list(a, b)] == ["", ""]
    (lacking,) = {summary.missing_everywhere for summary in reprise.list(a, a)}
    assert lacking == alone.share.missing


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no"):
        with refused(CheckpointError, str(path)):
            reprise.list(path)
