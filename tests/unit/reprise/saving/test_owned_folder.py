"""What retention deletes beside a mirror: nothing that the store must have and lacks, unless the disk is full."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from reprise.format.manifest import digest_of
from reprise.format.mirror_record import MIRROR, MirroredCheckpoint, MirrorRecord, MirrorRule
from reprise.format.names import FORMAT, MANIFEST, STATE
from reprise.ranks.channel import single_rank_channel
from reprise.saving.checkpointer import Checkpointer
from reprise.saving.policy import Retention, SavePolicy
from reprise.storage.files import Files
from reprise.storage.folder import CheckpointFolder, iteration_name
from tests.fakes import lone_contents

RULE = MirrorRule("s3://bucket/run")


class SmallDisk(Files):
    """A file system with room for little beside the checkpoints of `most`."""

    def __init__(self, root: Path, most: int) -> None:
        self._root, self._most = root, most

    def free_bytes(self, path: Path) -> int | None:
        count = len(CheckpointFolder(self._root, Files()).committed())
        return (self._most - count) << 20


def save(root: Path, iterations: Sequence[int], rule: MirrorRule | None, *, files: Files | None = None) -> list[int]:
    """Save with `max_checkpoint_keep=1`; return the iterations that stay."""
    policy = SavePolicy(root, retention=Retention(1, mirror=rule))
    checkpointer = Checkpointer(policy, single_rank_channel(), nonce=f"n{iterations[0]}", files=files)
    checkpointer.start()
    for iteration in iterations:
        document = {"format": FORMAT, "iteration": iteration}
        report = checkpointer.save(iteration, lone_contents({"w": torch.ones(9)}, {STATE: document}))
        assert report is not None
        assert report.error is None
    checkpointer.close()
    return CheckpointFolder(root, Files()).committed()


def note(root: Path, *iterations: int, url: str = RULE.url) -> None:
    """Write the record of a mirror that has these iterations."""
    digests = {n: digest_of((root / iteration_name(n) / MANIFEST).read_bytes()) for n in iterations}
    record = MirrorRecord(url, {iteration_name(n): MirroredCheckpoint(digest) for n, digest in digests.items()})
    (root / MIRROR).write_bytes(record.to_bytes())


def test_what_is_not_mirrored_stays_until_it_is(tmp_path: Path) -> None:
    assert save(tmp_path, [5, 10, 15], RULE) == [5, 10, 15]
    note(tmp_path, 5)
    assert save(tmp_path, [20], RULE) == [10, 15, 20]
    note(tmp_path, 10, 15, 20)
    assert save(tmp_path, [25], RULE) == [25]


def test_without_a_mirror_its_record_is_not_read(tmp_path: Path) -> None:
    assert save(tmp_path, [5, 10], None) == [10]


@pytest.mark.parametrize("content", [None, b"{}", b"\0"], ids=["missing", "of another format", "damaged"])
def test_a_record_that_cannot_be_read_lets_nothing_go(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / MIRROR).write_bytes(content)
    assert save(tmp_path, [5, 10], RULE) == [5, 10]


def test_the_record_of_another_url_counts_for_nothing(tmp_path: Path) -> None:
    save(tmp_path, [5], RULE)
    note(tmp_path, 5, url="s3://bucket/another")
    assert save(tmp_path, [10], RULE) == [5, 10]


def test_what_the_mirror_does_not_take_goes(tmp_path: Path) -> None:
    assert save(tmp_path, [5, 10, 15, 20], MirrorRule(RULE.url, interval=10)) == [10, 20]


def test_a_full_disk_takes_what_is_not_mirrored_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert save(tmp_path, [5, 10, 15, 20], RULE, files=SmallDisk(tmp_path, 3)) == [15, 20]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"the disk is full: iteration {iteration} is deleted before the store has it" for iteration in (5, 10)
    ]
