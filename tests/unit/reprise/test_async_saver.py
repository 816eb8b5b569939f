"""Saves in the background: what is committed is what was there at the call, by each front of the engine.

The fronts are the trainer's checkpointer, which copies what a step is about to change, and `AsyncSaver`, which copies
at the call, with models and with state dicts.
"""

from __future__ import annotations

import errno
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from reprise import AsyncSaver, load, load_state_dict, save
from reprise.errors import CheckpointError, LockError
from reprise.saving import plan
from reprise.saving.policy import SavePolicy, SaveReport
from reprise.saving.save_job import SaveJob
from reprise.saving.snapshot import Snapshot
from reprise.storage.files import FILE_SYSTEM, Files
from reprise.storage.worker import Job
from tests.fakes import JOIN_S, FailingFiles, StuckFiles, open_files, open_when_awaited
from tests.messages import refused
from tests.unit.reprise.saving.test_background import (
    SMALL_CHUNK,
    Gate,
    RefusesDirect,
    SlowToSync,
    Training,
    assert_same,
    be_patient,
    loaded,
    started,
)

STATE = {"a": torch.ones(2)}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", SMALL_CHUNK)
    monkeypatch.setattr(plan, "EXTENT_BYTES", 4 * SMALL_CHUNK)


def nested(training: Training) -> dict[str, object]:
    optimizer = get_optimizer_state_dict(training.net, training.optimizer)
    return {"model": get_model_state_dict(training.net), "optimizer": optimizer}


CHECKPOINTER, MODEL, _ = FRONTS = ("checkpointer", "model", "state dict")
fronts = pytest.mark.parametrize("front", FRONTS)
savers = pytest.mark.parametrize("front", FRONTS[1:])


class Front:
    """A way to save: the trainer's checkpointer, or a saver of a folder with a model or a state dict."""

    def __init__(self, kind: str, folder: Path, files: Files, **options: Any) -> None:
        self.saver = None if kind == CHECKPOINTER else AsyncSaver(folder, files=files, **options)
        self.is_of_model = kind == MODEL
        self.checkpointer = (
            started(SavePolicy(folder, async_save=True, **options), files)
            if self.saver is None
            else self.saver._checkpointer
        )

    def save(self, iteration: int, training: Training) -> None:
        if self.saver is None:
            training.iteration = iteration  # the one that the documents name
            self.checkpointer.save(iteration, training.contents())
        elif self.is_of_model:
            self.saver.save(iteration, training.net, training.optimizer)
        else:
            self.saver.save_state_dict(iteration, nested(training))

    def prepare(self, training: Training) -> None:
        assert self.saver is not None
        self.saver.prepare(training.net, training.optimizer)

    def wait(self) -> None:
        """Wait for the save under way, and raise why it failed."""
        (self.saver or self.checkpointer).wait()
        for report in self.checkpointer.reports():
            if report.error is not None:
                raise report.error

    def report(self) -> SaveReport:
        """Return the report of the save that is under way."""
        self.checkpointer.wait()
        (report,) = self.checkpointer.results.reports
        return report


@contextmanager
def opened(front: str, folder: Path, files: Files = FILE_SYSTEM, **options: Any) -> Iterator[Front]:
    """Open a folder for saves by a front, and close it at the end."""
    opened = Front(front, folder, files, **{"stall_timeout_s": JOIN_S, **options})
    yield opened
    (opened.saver or opened.checkpointer).close()


def _saves() -> Iterator[object]:
    """Yield all cases of a save during steps: those that have each pair of values, and the others for the night."""
    for (first, staging), (second, writes) in product(enumerate((None, 0, 300_000)), enumerate((0, 5, 9))):
        chosen = (first + second) % 2 == 0, second == (first + 1) % 3
        for front, placed, cached in product(FRONTS, (True, False), (True, False)):
            is_chosen = front in (CHECKPOINTER, FRONTS[(first + second) % 3])
            marks = () if is_chosen and (placed, cached) == chosen else pytest.mark.nightly
            yield pytest.param(front, staging, placed, cached, writes, marks=marks)


@pytest.mark.parametrize(("front", "staging_bytes", "is_placed", "around_cache", "writes"), [*_saves()])
def test_the_bytes_committed_are_those_of_the_call(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    front: str,
    staging_bytes: int | None,
    is_placed: bool,
    around_cache: bool,
    writes: int,
) -> None:
    training = Training()
    if is_placed:
        training.place_like_files()
    gate = Gate(writes, around_cache=around_cache)
    if front != CHECKPOINTER and staging_bytes is not None:  # else no call waits for the disk
        open_when_awaited(monkeypatch, gate.opened)
    with opened(front, tmp_path, gate, staging_bytes=staging_bytes) as saver:
        expected = training.values()
        saver.save(1, training)
        assert gate.is_shut.wait(JOIN_S)
        training.forward_backward()
        open_when_awaited(monkeypatch, gate.opened)  # a step may have to wait for a write that is under way
        for _ in range(3):
            training.step()
        gate.opened.set()
        report = saver.report()
    assert_same(loaded(tmp_path / "iter_0000001"), expected)
    if staging_bytes is None and writes < 9:  # there are chunks that no thread has begun to write
        assert report.copied_bytes > training.net.frozen.nbytes + training.net.count.nbytes


@savers
@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_prepared_first_save_is_copied_before_it_is_written(tmp_path: Path, front: str, is_prepared: bool) -> None:
    training = Training()
    with opened(front, tmp_path) as saver:
        if is_prepared:
            saver.prepare(training)
            assert not list(tmp_path.glob("iter_*"))
        else:
            saver.save(1, training)
            saver.wait()
        saver.save(2, training)
        report = saver.report()
        assert report.copied_bytes == report.written_bytes
        expected = training.values()
        saver.save(3, training)
        saver.prepare(training)  # beside the save under way, whose copies stay
        training.step()
    assert_same(loaded(tmp_path / "iter_0000003"), expected)


@savers
@pytest.mark.parametrize("is_load", [False, True])
def test_a_change_after_the_call_is_not_saved(tmp_path: Path, front: str, is_load: bool) -> None:
    """Whatever changes the tensors: an average, a clipping, a load."""
    training, gate = Training(), Gate(0)
    path = save(tmp_path / "older", training.net, training.optimizer, iteration=1)
    training.step()
    with opened(front, tmp_path / "saves", gate) as saver:
        expected = training.values()
        saver.save(1, training)
        assert gate.is_shut.wait(JOIN_S)  # a byte is on its way to the disk, and none is there
        if is_load:
            load(path, training.net, training.optimizer)
        else:
            for tensor in training.contents().live:
                tensor.local.fill_(9)
        gate.opened.set()
    assert_same(loaded(tmp_path / "saves"), expected)


def test_a_save_whose_copying_was_interrupted_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, gate = {name: torch.ones(1000) for name in "ab"}, Gate(0)

    def interrupt(snapshot: Snapshot) -> None:
        assert gate.is_shut.wait(JOIN_S)
        raise KeyboardInterrupt

    ends = Job.ends

    def change_and_end(job: Job, timeout_s: float) -> bool:
        for tensor in tensors.values():
            tensor.fill_(2.0)
        gate.opened.set()
        return ends(job, timeout_s)

    monkeypatch.setattr(Snapshot, "release", interrupt)
    monkeypatch.setattr(Job, "ends", change_and_end)  # the interrupted call awaits the writing thread
    saver = AsyncSaver(tmp_path, files=gate)
    with pytest.raises(KeyboardInterrupt):
        saver.save_state_dict(1, tensors)
    saver.close()  # the interrupt was the caller's to handle
    assert not list(tmp_path.glob("*iter_*"))


@savers
def test_a_state_larger_than_prepared_is_saved(tmp_path: Path, front: str) -> None:
    training, smaller = Training(), Training()
    smaller.optimizer.state.clear()
    with opened(front, tmp_path) as saver:
        saver.prepare(smaller)
        expected = training.values()
        saver.save(1, training)
        training.step()
    assert_same(loaded(tmp_path / "iter_0000001"), expected)


@fronts
def test_saves_closer_than_the_disk_is_fast_never_mix(tmp_path: Path, front: str) -> None:
    training, expected = Training(), {}
    with opened(front, tmp_path) as saver:
        for iteration in range(1, 6):
            expected[iteration] = training.values()
            saver.save(iteration, training)
            training.step()
    for iteration, values in expected.items():
        assert_same(loaded(tmp_path / f"iter_{iteration:07d}"), values)


KINDS = ["open_for_writing", "reserve", "write", "sync", "free_bytes", "rename"]


@pytest.mark.parametrize(
    ("front", "kind"),
    [
        pytest.param(front, kind, marks=() if (first + second) % 3 == 0 else pytest.mark.slow)
        for (first, front), (second, kind) in product(enumerate(FRONTS), enumerate(KINDS))
    ],
)
def test_a_failed_save_is_raised_once_by_the_next_call(tmp_path: Path, front: str, kind: str) -> None:
    files = FailingFiles(kind, errno.ENOSPC, after=7 if kind == "write" else 0)
    training = Training()
    with opened(front, tmp_path, files, staging_bytes=0) as saver:
        saver.save(1, training)
        training.step()
        with pytest.raises(CheckpointError, match="errno 28"):  # of whichever file is written first
            saver.save(2, training) if front != CHECKPOINTER else saver.wait()
        files.is_armed = False
        expected = training.values()
        saver.save(3, training)
        training.step()
        saver.wait()
        assert saver.checkpointer.results.last_error is None
        assert saver.checkpointer.results.blocked_s < JOIN_S  # no step has waited for a save that had ended
    assert_same(loaded(tmp_path), expected)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["iter_0000003"]


@fronts
def test_a_stalled_disk_ends_the_save_and_not_the_iteration(tmp_path: Path, front: str) -> None:
    files, training = StuckFiles(), Training()
    training.place_like_files()
    with opened(front, tmp_path, files, staging_bytes=0, stall_timeout_s=0.1) as saver:
        saver.save(1, training)
        assert files.reached.wait(JOIN_S)
        training.step()
        with pytest.raises(CheckpointError, match="iter_0000001"):
            saver.wait()
        saver.wait()
        files.released.set()
        saver.checkpointer.drain(JOIN_S)
        be_patient(saver.checkpointer)
        expected = training.values()
        saver.save(2, training)
        training.step()
    assert_same(loaded(tmp_path), expected)


@fronts
def test_a_step_does_not_wait_for_bytes_to_be_durable(tmp_path: Path, front: str) -> None:
    files, training = SlowToSync(), Training()
    training.place_like_files()
    with opened(front, tmp_path, files, staging_bytes=0) as saver:
        expected = training.values()
        saver.save(1, training)
        assert files.reached.wait(JOIN_S)
        training.step()
        assert saver.checkpointer.is_saving
        files.opened.set()
    assert_same(loaded(tmp_path), expected)


@fronts
def test_a_file_system_that_refuses_direct_writes_gets_others(tmp_path: Path, front: str) -> None:
    files, training = RefusesDirect(), Training()
    training.place_like_files()
    with opened(front, tmp_path, files) as saver:
        expected = training.values()
        saver.save(1, training)
    assert_same(loaded(tmp_path), expected)
    assert 0 < files.refused <= 2 * 2  # each file's first writes only, one of each thread at most


@fronts
def test_ten_saves_leave_no_descriptor_or_hook_and_one_plan(tmp_path: Path, front: str) -> None:
    training, counts, plans = Training(), set(), set()
    earlier = set(threading.enumerate())
    with opened(front, tmp_path) as saver:
        for iteration in range(1, 11):
            saver.save(iteration, training)
            training.step()
            saver.wait()
            threads, hooks = set(threading.enumerate()) - earlier, training.optimizer._optimizer_step_pre_hooks
            counts.add((len(threads), len(open_files()), len(hooks)))
            plans.add(id(saver.checkpointer._plan))
    assert len(counts) == 1
    assert len(plans) == 1 or front == CHECKPOINTER  # which is told of the same tensors by its caller


@fronts
def test_a_tensor_that_moved_is_planned_anew(tmp_path: Path, front: str) -> None:
    training = Training()
    with opened(front, tmp_path) as saver:
        saver.save(1, training)
        training.net.first.bias.data = training.net.first.bias.data.clone() + 1
        expected = training.values()
        saver.save(2, training)
    assert_same(loaded(tmp_path), expected)


def test_values_are_stored_as_they_were_at_the_call(tmp_path: Path) -> None:
    gate, losses, training = Gate(0), [0.5], Training()
    (group,) = training.optimizer.param_groups
    betas = group["betas"] = [0.9, 0.999]
    with AsyncSaver(tmp_path, files=gate) as saver:
        saver.save(1, training.net, training.optimizer, state={"log": {"losses": losses}})
        losses.append(0.4)
        betas[0] = 0.5
        gate.opened.set()
        saver.wait()
        saver.save_state_dict(2, {"log": {"losses": losses}})
        losses.append(0.3)
    again = Training()
    assert load(tmp_path / "iter_0000001", again.net, again.optimizer)["log"] == {"losses": [0.5]}
    assert again.optimizer.param_groups[0]["betas"] == [0.9, 0.999]
    state: dict[str, Any] = {"log": {"losses": []}}
    load_state_dict(tmp_path, state)
    assert state == {"log": {"losses": [0.5, 0.4]}}


def test_a_folder_has_one_saver(tmp_path: Path) -> None:
    with AsyncSaver(tmp_path), pytest.raises(LockError):
        AsyncSaver(tmp_path)
    AsyncSaver(tmp_path).close()


def test_after_a_failed_save_close_frees_the_folder(tmp_path: Path) -> None:
    saver = AsyncSaver(tmp_path, files=FailingFiles("rename", errno.ENOSPC))
    saver.save_state_dict(1, STATE)
    with refused(CheckpointError, "errno 28"):
        saver.close()
    saver.close()
    AsyncSaver(tmp_path).close()  # the lock is free
    assert not list(tmp_path.glob("iter_*"))


@pytest.mark.parametrize("error", [ZeroDivisionError(), SystemExit(0), SystemExit(3)], ids=repr)
def test_an_error_or_an_exit_in_the_loop_lets_the_save_land(tmp_path: Path, error: BaseException) -> None:
    def fail() -> None:
        with AsyncSaver(tmp_path) as saver:
            saver.save_state_dict(1, STATE)
            raise error

    with pytest.raises(type(error)):
        fail()
    assert (tmp_path / "iter_0000001").is_dir()
    AsyncSaver(tmp_path).close()  # the lock is free


@pytest.mark.parametrize("is_over", [False, True])
def test_a_defect_and_an_error_in_the_loop_free_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_over: bool
) -> None:
    gate = threading.Event()

    def fail(job: SaveJob) -> None:
        assert gate.wait(JOIN_S)
        raise MemoryError

    def loop() -> None:
        with AsyncSaver(tmp_path) as saver:
            saver.save_state_dict(1, STATE)
            gate.set()
            if is_over:
                saver._checkpointer.drain(JOIN_S)
            raise ZeroDivisionError

    monkeypatch.setattr(SaveJob, "run", fail)
    with pytest.raises(MemoryError):
        loop()
    monkeypatch.undo()
    AsyncSaver(tmp_path).close()  # the lock is free


def test_a_second_interrupt_frees_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    saver, gate = AsyncSaver(tmp_path), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(SaveJob, "run", lambda job: gate.wait(JOIN_S) and None)
        saver.save_state_dict(1, STATE)
        patch.setattr(Job, "wait", interrupt)
        patch.setattr(Job, "ends", interrupt)
        with pytest.raises(KeyboardInterrupt):
            saver.close()
    AsyncSaver(tmp_path).close()  # the lock is free
    gate.set()


@savers
def test_a_closed_saver_saves_and_prepares_nothing(tmp_path: Path, front: str) -> None:
    training = Training()
    with opened(front, tmp_path) as saver:
        saver.save(1, training)
    for call in (lambda: saver.save(2, training), lambda: saver.prepare(training)):
        with refused(CheckpointError, str(tmp_path)):
            call()
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000001"]


def test_a_closed_saver_keeps_neither_tensors_nor_copies(tmp_path: Path) -> None:
    array = np.ones(1000)
    state = {"a": torch.from_numpy(array)}
    saver = AsyncSaver(tmp_path)
    for iteration in (1, 2):
        saver.save_state_dict(iteration, state)
    kept = [weakref.ref(array), weakref.ref(saver._checkpointer._arena._memory.base)]  # type: ignore[arg-type]
    saver.close()
    del array, state
    gc.collect()
    assert [memory() is None for memory in kept] == [True, True]
