"""A read that fails is no damage: it is tried again for a while, and then ends the load with nothing renamed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from reprise.errors import UnreadableError
from reprise.format.names import STATE
from reprise.loading.choose import LoadSource
from reprise.loading.restorer import Restorer
from reprise.ranks.channel import StoreChannel, single_rank_channel
from reprise.saving.checkpointer import Checkpointer
from reprise.saving.policy import Retention, SavePolicy
from reprise.saving.retention import decide_expired
from reprise.storage import json_file, patience
from reprise.storage.files import Files
from reprise.storage.folder import CheckpointFolder
from reprise.storage.patience import RETRY_S, unreadable, with_retries
from tests.fakes import FailingFiles, run_ranks
from tests.messages import refused
from tests.unit.reprise.loading.test_reader import contents, save

# Errors of a disk, a server, a limit and permissions; ESTALE is a file of a server that has come back.
CODES = (errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT)
READS = ("open_for_reading", "read", "size")


class Clock:
    """A clock that only sleeping moves, in place of `time`; `wakes` maps a number of sleeps to what comes after it."""

    def __init__(self) -> None:
        self.now_s, self.sleeps = 0.0, 0
        self.wakes: dict[int, Callable[[], object]] = {}

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.sleeps += 1
        self.wakes.get(self.sleeps, lambda: None)()

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(patience, "time", clock)
    return clock


class Failing(FailingFiles):
    """Calls of one kind fail for checkpoint folders of one name."""

    def __init__(self, kind: str, code: int, *, within: str = "iter_0000011") -> None:
        super().__init__(kind, code)
        self._within = within

    def _maybe_fail(self, kind: str, path: Path | None = None) -> None:
        if path is None or self._within in path.parts:
            super()._maybe_fail(kind, path)

    def read(self, descriptor: int, buffer: memoryview, *, offset: int) -> int:
        self._maybe_fail("read", Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        return Files.read(self, descriptor, buffer, offset=offset)

    def size(self, path: Path) -> int:
        self._maybe_fail("size", path)
        return super().size(path)


def names(run: Path) -> Sequence[str]:
    return sorted(path.name for path in run.iterdir() if path.is_dir())


def resume(run: Path, files: Files, channel: StoreChannel | None = None) -> int:
    """Load the newest and rewind to it, as the trainer does; return the iteration."""
    channel = channel or single_rank_channel()
    checkpointer = Checkpointer(SavePolicy(run), channel, nonce="m", files=files)
    restorer = Restorer(channel, nonce="m", files=files)
    checkpointer.start()
    try:
        target = contents(0)
        restored = restorer.restore(LoadSource(run), check=lambda _: None, live=lambda _: target.live)
        checkpointer.note_loaded(restored)
        checkpointer.rewind(restored.checkpoint.iteration)
        return restored.checkpoint.iteration
    finally:
        checkpointer.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run folder with iterations 9, 10 and 11."""
    for iteration in (9, 10, 11):
        save(tmp_path, iteration)
    return tmp_path


@pytest.mark.parametrize("passes", [False, True])
@pytest.mark.parametrize(("number", "code"), [*enumerate(CODES)], ids=[errno.errorcode[code] for code in CODES])
def test_a_read_error_ends_the_load_or_passes_with_no_rename(
    run: Path, clock: Clock, number: int, code: int, passes: bool
) -> None:
    kind, before = READS[number % 3], names(run)
    files = Failing(kind, code)
    if passes:
        clock.wakes = {4: lambda: setattr(files, "is_armed", False)}
        assert resume(run, files) == 11
        assert files.failures > 3
    else:
        with refused(UnreadableError, f"errno {code}", str(run / "iter_0000011")):
            resume(run, files)
        assert RETRY_S <= clock.now_s <= 2 * RETRY_S
        assert clock.sleeps < 4 * RETRY_S  # growing pauses: other ranks may wait for the same server
    assert names(run) == before


def test_a_stale_handle_is_opened_again(run: Path) -> None:
    """A descriptor of a file that its server no longer knows fails for ever; one that is opened now does not."""

    class Stale(Files):
        def __init__(self) -> None:
            self.opened = 0
            self.stale: int | None = None

        def open_for_reading(self, path: Path) -> int:
            descriptor = super().open_for_reading(path)
            if path.name.startswith("model-00001"):
                self.opened += 1
                self.stale = descriptor if self.opened == 1 else None
            return descriptor

        def read(self, descriptor: int, buffer: memoryview, *, offset: int) -> int:
            if descriptor == self.stale:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return super().read(descriptor, buffer, offset=offset)

    files, before = Stale(), len(os.listdir("/proc/self/fd"))
    assert resume(run, files) == 11
    assert files.opened > 1
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_is_opened_again_where_it_was_found(tmp_path: Path, clock: Clock) -> None:
    """As after a mount made anew: the old file system's descriptors name no path to the new one."""
    (tmp_path / "mount").mkdir()
    (tmp_path / "mount/file").write_bytes(b"old")
    failing = FailingFiles("read", errno.ESTALE)
    clock.wakes = {1: lambda: setattr(failing, "is_armed", False)}
    files = with_retries(failing)
    descriptor, buffer = files.open_for_reading(tmp_path / "mount/file"), bytearray(3)
    (tmp_path / "mount").rename(tmp_path / "gone")
    (tmp_path / "mount").mkdir()
    (tmp_path / "mount/file").write_bytes(b"new")
    assert files.read(descriptor, memoryview(buffer), offset=0) == 3
    assert buffer == b"new"
    files.close(descriptor)


@pytest.mark.parametrize(("culprit", "kind"), [(0, "size"), (1, "read")])
def test_what_one_rank_cannot_read_ends_every_rank_alike(run: Path, culprit: int, kind: str) -> None:
    before = names(run)

    def call(channel: StoreChannel) -> int:
        files = Failing(kind if channel.rank == culprit else "none", errno.EIO)
        return resume(run, files, channel)

    outcomes = run_ranks(2, call)
    assert [type(outcome) for outcome in outcomes] == [UnreadableError, UnreadableError]
    assert all("errno 5" in str(outcome) for outcome in outcomes)
    assert f"Rank {culprit}: " in str(outcomes[1 - culprit])
    assert names(run) == before


def test_damage_is_not_waited_for_and_goes_back_to_the_older_one(run: Path, clock: Clock) -> None:
    (run / "iter_0000011" / STATE).unlink()
    assert resume(run, Files()) == 10
    assert clock.sleeps == 0
    assert names(run) == ["iter_0000009", "iter_0000010", "iter_0000011.superseded-1"]


def test_a_best_checkpoint_with_an_unreadable_loss_is_kept(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = json_file.read

    def failing(path: Path) -> json_file.Json:
        if "iter_0000009" in path.parts:
            raise unreadable(OSError(errno.EIO, os.strerror(errno.EIO)), where=path)
        return read(path)

    monkeypatch.setattr(json_file, "read", failing)
    folder = CheckpointFolder(run, Files())
    assert decide_expired(folder, Retention(1, keep_best=1), pinned=()) == [10]
    assert "iter_0000009 cannot be read" in caplog.text
    monkeypatch.undo()
    assert decide_expired(folder, Retention(1, keep_best=1), pinned=()) == [9, 10]


def test_a_checkpoint_removed_meanwhile_ends_no_deletion(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckpointFolder, "committed", lambda _: [8, 9, 10, 11])
    assert decide_expired(CheckpointFolder(run, Files()), Retention(1)) == [8, 9, 10]
