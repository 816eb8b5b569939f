"""What a save takes of the process: descriptors, however many files a checkpoint has."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from reprise.checkpointer import Checkpointer
from reprise.commit.channel import single_rank_channel
from reprise.format.names import FORMAT, STATE
from reprise.loading.reader import open_checkpoint, read_places
from reprise.loading.verify import verify_share
from reprise.policy import SavePolicy
from reprise.storage.files import Files
from reprise.tensors.live import Contents
from tests.fakes import FailingFiles, lone_contents

FILES = 200
SPARE = 40  # descriptors


def descriptors() -> list[str]:
    gc.collect()  # what earlier tests of the process left in cycles would close its files at any time
    return sorted(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def few_descriptors() -> Iterator[None]:
    """Let this process open few more files than it has open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, descriptors())) + SPARE, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def many_files() -> Contents:
    values = {f"w{number}": torch.full((1024,), float(number)) for number in range(FILES)}
    return lone_contents(values, {STATE: {"format": FORMAT, "iteration": 1}})


@pytest.mark.parametrize("around_cache", [True, False])
def test_a_checkpoint_of_more_files_than_may_be_open_is_saved(tmp_path: Path, around_cache: bool) -> None:
    class Refusing(Files):
        def open_direct(self, path: Path) -> int | None:
            return super().open_direct(path) if around_cache else None

    checkpointer = Checkpointer(
        SavePolicy(tmp_path, file_bytes=4096), single_rank_channel(), nonce="n", files=Refusing()
    )
    checkpointer.start()
    before = descriptors()
    with few_descriptors():
        report = checkpointer.save(1, many_files())
    assert report is not None
    assert report.error is None, str(report.error)
    assert descriptors() == before
    checkpoint = open_checkpoint(report.path, Files())
    assert len(list(report.path.glob("*.safetensors"))) >= FILES
    total = verify_share(checkpoint, read_places(checkpoint), rank=0, world_size=1)
    assert total == FILES * 4096
    checkpointer.close()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_where_no_descriptor_is_to_be_had_the_limit_is_named(tmp_path: Path, code: int) -> None:
    files = FailingFiles("open_for_writing", code)
    checkpointer = Checkpointer(SavePolicy(tmp_path), single_rank_channel(), nonce="n", files=files)
    checkpointer.start()
    report = checkpointer.save(1, many_files())
    assert report is not None
    assert "`ulimit -n`" in str(report.error)
    assert "room" not in str(report.error)
    checkpointer.close()


@pytest.mark.parametrize("kind", ["reserve", "write", "sync", "close"])
@pytest.mark.parametrize("after", [0, 7])
def test_a_save_that_fails_leaves_nothing_open(tmp_path: Path, kind: str, after: int) -> None:
    files = FailingFiles(kind, after=after)
    checkpointer = Checkpointer(SavePolicy(tmp_path, file_bytes=4096), single_rank_channel(), nonce="n", files=files)
    checkpointer.start()
    before = descriptors()
    report = checkpointer.save(1, many_files())
    assert report is not None
    assert "errno 5" in str(report.error)
    assert descriptors() == before
    checkpointer.close()


class CountsSyncs(Files):
    """A file system which notes how many syncs are made together."""

    def __init__(self) -> None:
        self.together: list[int] = []

    def sync_together(self, syncs: Sequence[Callable[[], None]]) -> None:
        self.together.append(len(syncs))
        super().sync_together(syncs)


def test_a_single_rank_waits_twice_for_the_disk(tmp_path: Path) -> None:
    files = CountsSyncs()
    checkpointer = Checkpointer(SavePolicy(tmp_path, file_bytes=4096), single_rank_channel(), nonce="n", files=files)
    checkpointer.start()
    report = checkpointer.save(1, many_files())
    checkpointer.close()
    assert report is not None
    assert report.error is None
    everything, names = files.together
    assert everything == FILES + len(["manifest.json", "trainer_state.json", "model.safetensors.index.json", "folder"])
    assert names == len(["root", "tracker"])
