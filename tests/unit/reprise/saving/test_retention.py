"""What retention deletes beside a mirror: nothing that the store must have and lacks, unless the disk is full."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
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


def save(root: Path, iterations: Sequence[int], rule: MirrorRule | None, files: Files | None = None) -> list[int]:
    """Save with `max_checkpoint_keep=1`; return the iterations that stay."""
    policy = SavePolicy(root, retention=Retention(1, mirror=rule))
    saver = Checkpointer(policy, single_rank_channel(), nonce=f"n{iterations[0]}", files=files)
    with closing(saver) as checkpointer:
        checkpointer.start()
        for iteration in iterations:
            document = {"format": FORMAT, "iteration": iteration}
            report = checkpointer.save(iteration, lone_contents({"w": torch.ones(9)}, {STATE: document}))
            assert report is not None
            assert report.error is None
    return CheckpointFolder(root, Files()).committed()


def record_of(root: Path, iterations: Sequence[int], url: str = RULE.url) -> bytes:
    """Return the record of a mirror that has these iterations."""
    digests = {n: digest_of((root / iteration_name(n) / MANIFEST).read_bytes()) for n in iterations}
    committed = {iteration_name(n): MirroredCheckpoint(digest) for n, digest in digests.items()}
    return MirrorRecord(MirrorRule(url), committed).to_bytes()


def test_what_is_not_mirrored_stays_until_it_is(tmp_path: Path) -> None:
    assert save(tmp_path, [5, 10, 15], RULE) == [5, 10, 15]
    record = tmp_path / MIRROR
    for content in (b"{}", b"\0", record_of(tmp_path, [5, 10, 15], "s3://bucket/another")):
        record.write_bytes(content)  # of another format, damaged, of another store
        assert save(tmp_path, [15], RULE) == [5, 10, 15]
    record.write_bytes(record_of(tmp_path, [5]))
    assert save(tmp_path, [20], RULE) == [10, 15, 20]
    record.write_bytes(record_of(tmp_path, [10, 15, 20]))
    assert save(tmp_path, [25], RULE) == [25]
    assert save(tmp_path, [30, 35], None) == [35]


def test_what_the_mirror_does_not_take_goes(tmp_path: Path) -> None:
    assert save(tmp_path, [5, 10, 15, 20], MirrorRule(RULE.url, interval=10)) == [10, 20]


def test_a_full_disk_takes_what_is_not_mirrored_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert save(tmp_path, [5, 10, 15, 20], RULE, SmallDisk(tmp_path, 3)) == [15, 20]
    lines = [record.getMessage() for record in caplog.records]
    assert [f"deleted iteration {n}," in line for n, line in zip((5, 10), lines, strict=True)] == [True, True]
