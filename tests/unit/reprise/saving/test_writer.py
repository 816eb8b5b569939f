"""What a save takes of the process: descriptors, however many files a checkpoint has."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from reprise.format.names import FORMAT, STATE
from reprise.loading.blocks import verify_tensors
from reprise.loading.reader import open_checkpoint
from reprise.ranks.channel import single_rank_channel
from reprise.saving.checkpointer import Checkpointer
from reprise.saving.policy import SavePolicy, SaveReport
from reprise.storage.files import Files
from reprise.tensors.live import Contents
from tests.fakes import FailingFiles, lone_contents, open_files

FILES = 200
SPARE = 40  # descriptors


@contextlib.contextmanager
def few_open_files() -> Iterator[None]:
    """Let this process open few more files than it has open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + SPARE, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def many_files() -> Contents:
    values = {f"w{number}": torch.full((1024,), float(number)) for number in range(FILES)}
    return lone_contents(values, {STATE: {"format": FORMAT, "iteration": 1}})


def saved(folder: Path, files: Files) -> SaveReport:
    """Save a checkpoint of many files."""
    checkpointer = Checkpointer(SavePolicy(folder, file_bytes=4096), single_rank_channel(), nonce="n", files=files)
    checkpointer.start()
    report = checkpointer.save(1, many_files())
    checkpointer.close()
    assert report is not None
    return report


@pytest.mark.parametrize("around_cache", [True, False])
def test_a_checkpoint_of_more_files_than_may_be_open_is_saved(tmp_path: Path, around_cache: bool) -> None:
    class Refusing(Files):
        def open_direct(self, path: Path) -> int | None:
            return super().open_direct(path) if around_cache else None

    before = open_files()
    with few_open_files():
        report = saved(tmp_path, Refusing())
    assert report.error is None, str(report.error)
    assert open_files() == before
    checkpoint = open_checkpoint(report.path, Files())
    assert len(list(report.path.glob("*.safetensors"))) >= FILES
    assert verify_tensors(checkpoint) == FILES * 4096


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_where_no_descriptor_is_to_be_had_the_limit_is_named(tmp_path: Path, code: int) -> None:
    text = str(saved(tmp_path, FailingFiles("open_for_writing", code)).error)
    assert "`ulimit -n`" in text
    assert "room" not in text


@pytest.mark.parametrize(("kind", "after"), [("reserve", 7), ("write", 0), ("write", 7), ("sync", 7), ("close", 7)])
def test_a_save_that_fails_leaves_nothing_open(tmp_path: Path, kind: str, after: int) -> None:
    before = open_files()
    assert "errno 5" in str(saved(tmp_path, FailingFiles(kind, after=after)).error)
    assert open_files() == before


class CountsSyncs(Files):
    """A file system which notes how many syncs are made together."""

    def __init__(self) -> None:
        self.together: list[int] = []

    def sync_together(self, syncs: Sequence[Callable[[], None]]) -> None:
        self.together.append(len(syncs))
        super().sync_together(syncs)


def test_a_rank_waits_for_the_disk_twice_before_the_rename(tmp_path: Path) -> None:
    files = CountsSyncs()
    assert saved(tmp_path, files).error is None
    documents = len(["manifest.json", "trainer_state.json", "model.safetensors.index.json", "folder"])
    assert files.together == [FILES, documents]
