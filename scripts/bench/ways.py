"""Raw reading and writing, and our ways of saving and loading. The alternatives are in `peers.py`."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reprise import AsyncSaver, load_state_dict
from reprise.channel import single_rank_channel
from reprise.files import Files
from reprise.folder import iteration_name
from reprise.format.layout import PAGE_BYTES
from reprise.live_tensors import map_memory
from reprise.reading import LoadSource
from reprise.savers import Checkpointer, Restorer, SavePolicy, SaveReport
from scripts.bench.probe import Loop, PeakMemory, files_of, fill_from, seconds_of, sync_folder
from scripts.bench.subject import Subject

RAW, DIRECT = "raw write + fsync", "raw write, O_DIRECT"
INLINE, BACKGROUND, AT_ONCE = "ours, inline", "ours, background", "ours, step at once"
LIBRARY, LIBRARY_FIRST = "ours, AsyncSaver", "ours, AsyncSaver, prepared first save"
_DIRECT_BYTES = 8 << 20  # in one call
_PREPARE_S = 5.0  # in which a prepared saver gets its memory, some GB at most
MEASURED_SAVE = 3  # in order: the second may still populate the staging memory, beside the thread that does


@dataclass(frozen=True, slots=True)
class Saved:
    """The cost of a save.

    Args:
        durable_s: from the call until files and folder are durable.
        blocked_s: time for which the main thread is blocked.
        slowed_s: slowdown of a loop beside the save.
        peak_bytes: peak memory of the save.
        reported_blocked_s: `blocked_s` in our own report; 0 for the alternatives.
    """

    durable_s: float
    blocked_s: float
    slowed_s: float
    peak_bytes: int
    reported_blocked_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Way:
    """A way of saving a subject into an empty folder, and of loading it from there.

    Args:
        fills: whether `load` fills the subject, or only reads what was written.
        may_raise: errors that mean that this way is not available here; they do not end the benchmark.
    """

    save: Callable[[Path, Loop], Saved]
    load: Callable[[Path], object]
    fills: bool = True
    may_raise: tuple[type[BaseException], ...] = ()


def blocking(write: Callable[[Path], object]) -> Callable[[Path, Loop], Saved]:
    """Return the save that calls `write`, which returns when all is durable."""

    def save(folder: Path, _: Loop) -> Saved:
        peak = PeakMemory()
        took_s = seconds_of(lambda: write(folder))
        return Saved(took_s, took_s, 0.0, peak.grown_bytes())

    return save


def own_ways(subject: Subject) -> Mapping[str, Way]:
    """Return the raw write and our ways."""
    load = functools.partial(load_ours, subject)
    return {
        RAW: Way(blocking(functools.partial(write_raw, subject)), functools.partial(read_raw, subject), fills=False),
        DIRECT: Way(_direct_write(subject), functools.partial(read_raw, subject), fills=False, may_raise=(OSError,)),
        INLINE: Way(functools.partial(_save_inline, subject), load),
        BACKGROUND: Way(functools.partial(_save_in_background, subject, steps_at_once=False), load),
        AT_ONCE: Way(functools.partial(_save_in_background, subject, steps_at_once=True), load),
        LIBRARY: Way(functools.partial(_save_with_library, subject), functools.partial(_load_with_library, subject)),
        LIBRARY_FIRST: Way(
            functools.partial(_save_with_library, subject, measured=1), functools.partial(_load_with_library, subject)
        ),
    }


def write_raw(subject: Subject, folder: Path) -> None:
    """Write the bytes of all tensors to a file, tensor after tensor."""
    with (folder / "raw").open("wb") as file:
        for memory in subject.flat():
            file.write(memory.data)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def _direct_write(subject: Subject) -> Callable[[Path, Loop], Saved]:
    """Return a direct write of the same bytes from page-aligned memory, without the page cache."""
    data = map_memory(-(-subject.own_bytes // PAGE_BYTES) * PAGE_BYTES)
    data[: subject.own_bytes] = np.concatenate(list(subject.flat()))
    files = Files()

    def write(folder: Path) -> None:
        descriptor = files.open_for_writing(folder / "direct")
        try:
            files.reserve(descriptor, data.nbytes)
            direct = files.open_direct(folder / "direct")
            if direct is None:
                raise OSError(errno.EOPNOTSUPP, "no O_DIRECT", str(folder))
            with contextlib.ExitStack() as stack:
                stack.callback(files.close, direct)
                for at in range(0, data.nbytes, _DIRECT_BYTES):
                    files.write(direct, [data[at : at + _DIRECT_BYTES].data], offset=at)
            files.sync(descriptor)
        finally:
            files.close(descriptor)
        sync_folder(folder)

    return blocking(write)


def read_raw(subject: Subject, folder: Path) -> None:
    """Read a raw file into fresh memory."""
    fill_from(files_of(folder), memoryview(bytearray(subject.own_bytes)))


def opened_checkpointer(folder: Path, *, async_save: bool) -> Checkpointer:
    """Return a checkpointer of a single rank, ready to save."""
    checkpointer = Checkpointer(SavePolicy(folder, async_save=async_save), single_rank_channel(), nonce="bench")
    checkpointer.start()
    return checkpointer


def load_ours(subject: Subject, folder: Path) -> None:
    """Load the newest checkpoint of a folder, checking every digest."""
    restorer = Restorer(single_rank_channel(), nonce="bench")
    restorer.restore(LoadSource(folder), check=lambda _: None, live=lambda _: list(subject.state.shards()), is_new=True)


def proven(report: SaveReport | None) -> SaveReport:
    """Return the report of a save that became a checkpoint.

    Raises:
        TrainerError: if it did not.
    """
    assert report is not None
    if report.error is not None:
        raise report.error
    return report


def _save_inline(subject: Subject, folder: Path, _: Loop) -> Saved:
    checkpointer = opened_checkpointer(folder, async_save=False)
    peak = PeakMemory()
    start = time.perf_counter()
    report = proven(checkpointer.save(1, subject.contents(1)))
    took_s = time.perf_counter() - start
    grown = peak.grown_bytes()
    checkpointer.close()
    return Saved(took_s, took_s, 0.0, grown, report.blocked_s)


def _save_in_background(subject: Subject, folder: Path, loop: Loop, *, steps_at_once: bool) -> Saved:
    """Save and return the cost of the last save; those before it get the staging memory, and populate its pages.

    The optimizer's next step comes after the save has ended, or at once.
    """
    peak = PeakMemory()  # before the staging memory is there
    checkpointer = opened_checkpointer(folder, async_save=True)
    try:
        for iteration in range(1, MEASURED_SAVE):
            checkpointer.save(iteration, subject.contents(iteration))
            subject.step()
            checkpointer.wait()
            proven(checkpointer.reports()[-1])
            shutil.rmtree(folder / iteration_name(iteration))
        os.sync()
        loop.learn()
        begin = time.perf_counter()
        checkpointer.save(MEASURED_SAVE, subject.contents(MEASURED_SAVE))
        blocked_s = time.perf_counter() - begin
        if steps_at_once:
            blocked_s += seconds_of(subject.step)
        slowed_s = loop.run_until(lambda: not checkpointer.is_saving)
        blocked_s += seconds_of(subject.step) + seconds_of(checkpointer.wait)
        report = proven(checkpointer.reports()[-1])
        return Saved(report.seconds, blocked_s, slowed_s, peak.grown_bytes(), report.blocked_s)
    finally:
        checkpointer.close()


def _save_with_library(subject: Subject, folder: Path, loop: Loop, *, measured: int = MEASURED_SAVE) -> Saved:
    """Save by the public calls and return the cost of save number `measured`, with a step right after it."""
    peak = PeakMemory()
    with AsyncSaver(folder) as saver:
        if measured == 1:
            saver.prepare_state_dict({"state": subject.named()})
            end = time.perf_counter() + _PREPARE_S
            loop.run_until(lambda: time.perf_counter() > end)  # as training does between its first step and this save
        for iteration in range(1, measured):
            saver.save_state_dict(iteration, {"state": subject.named()})
            subject.step()
            saver.wait()
            shutil.rmtree(folder / iteration_name(iteration))
        os.sync()
        loop.learn()
        begin = time.perf_counter()
        saver.save_state_dict(measured, {"state": subject.named()})
        subject.step()
        blocked_s = time.perf_counter() - begin
        slowed_s = loop.run_until(lambda: not saver.is_saving)
        durable_s = time.perf_counter() - begin
        saver.wait()
    return Saved(durable_s, blocked_s, slowed_s, peak.grown_bytes())


def _load_with_library(subject: Subject, folder: Path) -> None:
    load_state_dict(folder, {"state": subject.named()})
