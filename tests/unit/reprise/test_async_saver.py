"""`AsyncSaver` in a loop of one's own: the trainer's background saves, for models and for state dicts."""

from __future__ import annotations

import errno
import gc
import math
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from reprise import AsyncSaver, load, load_state_dict, save, save_state_dict
from reprise.errors import CheckpointError, ConfigError, LockError
from reprise.policy import SaveReport
from reprise.saving import plan
from reprise.saving.save_job import SaveJob
from reprise.storage.worker import Job
from tests.fakes import JOIN_S, FailingFiles, StuckFiles, open_when_awaited
from tests.unit.reprise.saving.test_background import (
    SMALL_CHUNK,
    Gate,
    RefusesDirect,
    SlowToSync,
    Training,
    assert_same,
    be_patient,
    descriptors,
    during_steps,
    loaded,
)

Save = Callable[[AsyncSaver, int, Training], None]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", SMALL_CHUNK)
    monkeypatch.setattr(plan, "EXTENT_BYTES", 4 * SMALL_CHUNK)


def save_model(saver: AsyncSaver, iteration: int, training: Training) -> None:
    saver.save(iteration, training.net, training.optimizer)


def save_nested(saver: AsyncSaver, iteration: int, training: Training) -> None:
    saver.save_state_dict(iteration, nested(training))


def nested(training: Training) -> dict[str, object]:
    optimizer = get_optimizer_state_dict(training.net, training.optimizer)
    return {"model": get_model_state_dict(training.net), "optimizer": optimizer}


def prepare(saver: AsyncSaver, save: Save, training: Training) -> None:
    """Prepare a saver for a way of saving."""
    if save is save_model:
        saver.prepare(training.net, training.optimizer)
    else:
        saver.prepare_state_dict(nested(training))


WAYS: dict[str, Save] = {"model": save_model, "state dict": save_nested}
ways = pytest.mark.parametrize("save", WAYS.values(), ids=WAYS.keys())


def report_of(saver: AsyncSaver) -> SaveReport:
    """Return the report of the save that is under way."""
    saver._checkpointer.wait()
    (report,) = saver._checkpointer.results.reports
    return report


@pytest.mark.parametrize("save", [save_nested, pytest.param(save_model, marks=pytest.mark.slow)])
@during_steps
def test_the_bytes_committed_are_those_of_the_call(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    save: Save,
    staging_bytes: int | None,
    is_placed: bool,
    around_cache: bool,
    writes: int,
) -> None:
    training = Training()
    if is_placed:
        training.place_like_files()
    gate = Gate(writes, around_cache=around_cache)
    if staging_bytes is not None:  # else no call waits for the disk
        open_when_awaited(monkeypatch, gate.opened)
    with AsyncSaver(tmp_path, staging_bytes=staging_bytes, stall_timeout_s=JOIN_S, files=gate) as saver:
        expected = training.values()
        save(saver, 1, training)
        for _ in range(3):
            training.step()
        gate.opened.set()
    assert_same(loaded(tmp_path / "iter_0000001"), expected)


@ways
def test_a_second_save_is_copied_before_it_is_written(tmp_path: Path, save: Save) -> None:
    training = Training()
    with AsyncSaver(tmp_path) as saver:
        for iteration in (1, 2):
            save(saver, iteration, training)
            report = report_of(saver)
            saver.wait()
    assert report.copied_bytes == report.written_bytes


@ways
def test_a_prepared_first_save_is_copied_before_it_is_written(tmp_path: Path, save: Save) -> None:
    training = Training()
    with AsyncSaver(tmp_path) as saver:
        prepare(saver, save, training)
        assert not list(tmp_path.glob("iter_*"))
        save(saver, 1, training)
        report = report_of(saver)
        assert report.copied_bytes == report.written_bytes
        expected = training.values()
        save(saver, 2, training)
        prepare(saver, save, training)  # beside the save under way, whose copies stay
        training.step()
    assert_same(loaded(tmp_path / "iter_0000002"), expected)


@ways
def test_a_state_larger_than_prepared_is_saved(tmp_path: Path, save: Save) -> None:
    training, smaller = Training(), Training()
    smaller.optimizer.state.clear()
    with AsyncSaver(tmp_path) as saver:
        prepare(saver, save, smaller)
        expected = training.values()
        save(saver, 1, training)
        training.step()
    assert_same(loaded(tmp_path / "iter_0000001"), expected)


def test_a_closed_saver_prepares_nothing(tmp_path: Path) -> None:
    with AsyncSaver(tmp_path) as saver:
        saver.prepare_state_dict({"w": torch.ones(9)})
    with pytest.raises(CheckpointError, match="closed"):
        saver.prepare_state_dict({"w": torch.ones(9)})
    assert not list(tmp_path.glob("iter_*"))


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


def test_an_iteration_that_is_there_may_be_refused(tmp_path: Path) -> None:
    training = Training()
    with AsyncSaver(tmp_path, overwrite=False) as saver:
        save_model(saver, 1, training)
        for save_again in WAYS.values():
            with pytest.raises(CheckpointError, match=r"there already \(.*iter_0000001\).*overwrite=True"):
                save_again(saver, 1, training)
        save_model(saver, 2, training)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000001", "iter_0000002"]


@ways
def test_saves_closer_than_the_disk_is_fast_never_mix(tmp_path: Path, save: Save) -> None:
    training, expected = Training(), {}
    with AsyncSaver(tmp_path) as saver:
        for iteration in range(1, 9):
            expected[iteration] = training.values()
            save(saver, iteration, training)
            training.step()
    for iteration, values in expected.items():
        assert_same(loaded(tmp_path / f"iter_{iteration:07d}"), values)


@ways
@pytest.mark.parametrize("kind", ["open_for_writing", "reserve", "write", "sync", "free_bytes", "rename"])
def test_a_failed_save_is_raised_once_by_the_next_call(tmp_path: Path, save: Save, kind: str) -> None:
    files = FailingFiles(kind, errno.ENOSPC, after=7 if kind == "write" else 0)
    training = Training()
    with AsyncSaver(tmp_path, staging_bytes=0, stall_timeout_s=JOIN_S, files=files) as saver:
        save(saver, 1, training)
        training.step()
        with pytest.raises(CheckpointError, match="errno 28"):
            save(saver, 2, training)
        files.is_armed = False
        expected = training.values()
        save(saver, 3, training)
        training.step()
        saver.wait()
    assert_same(loaded(tmp_path), expected)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["iter_0000003"]


@ways
def test_a_stalled_disk_ends_the_save_and_not_the_iteration(tmp_path: Path, save: Save) -> None:
    files, training = StuckFiles(), Training()
    training.place_like_files()
    saver = AsyncSaver(tmp_path, staging_bytes=0, stall_timeout_s=0.1, files=files)
    save(saver, 1, training)
    assert files.reached.wait(JOIN_S)
    training.step()
    with pytest.raises(CheckpointError, match=r"the disk has written nothing .*iter_0000001\)"):
        saver.wait()
    saver.wait()
    files.released.set()
    saver._checkpointer.drain(JOIN_S)
    be_patient(saver._checkpointer)
    expected = training.values()
    save(saver, 2, training)
    training.step()
    saver.close()
    assert_same(loaded(tmp_path), expected)


@ways
def test_a_step_does_not_wait_for_bytes_to_be_durable(tmp_path: Path, save: Save) -> None:
    files, training = SlowToSync(), Training()
    training.place_like_files()
    with AsyncSaver(tmp_path, staging_bytes=0, stall_timeout_s=JOIN_S, files=files) as saver:
        expected = training.values()
        save(saver, 1, training)
        assert files.reached.wait(JOIN_S)
        training.step()
        assert saver.is_saving
        files.opened.set()
    assert_same(loaded(tmp_path), expected)


@ways
def test_a_file_system_that_refuses_direct_writes_gets_others(tmp_path: Path, save: Save) -> None:
    files, training = RefusesDirect(), Training()
    training.place_like_files()
    with AsyncSaver(tmp_path, files=files) as saver:
        expected = training.values()
        save(saver, 1, training)
    assert_same(loaded(tmp_path), expected)
    assert files.refused > 0


@ways
def test_fifty_saves_leave_no_descriptor_or_hook_and_one_plan(tmp_path: Path, save: Save) -> None:
    training, counts, plans = Training(), set(), set()
    with AsyncSaver(tmp_path, max_checkpoint_keep=1) as saver:
        for iteration in range(1, 51):
            save(saver, iteration, training)
            training.step()
            saver.wait()
            counts.add(
                (threading.active_count(), len(descriptors()), len(training.optimizer._optimizer_step_pre_hooks))
            )
            plans.add(id(saver._checkpointer._staging._plan))
    assert len(counts) == len(plans) == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["iter_0000050"]


@ways
def test_a_second_save_of_an_iteration_supersedes_it(tmp_path: Path, save: Save) -> None:
    training, expected = Training(), []
    with AsyncSaver(tmp_path, max_checkpoint_keep=1) as saver:
        for _ in range(2):
            expected.append(training.values())
            save(saver, 1, training)
            training.step()
    assert_same(loaded(tmp_path / "iter_0000001.superseded-1"), expected[0])
    assert_same(loaded(tmp_path / "iter_0000001"), expected[1])


def test_a_tensor_that_moved_is_planned_anew(tmp_path: Path) -> None:
    training = Training()
    with AsyncSaver(tmp_path) as saver:
        save_model(saver, 1, training)
        training.net.first.bias.data = training.net.first.bias.data.clone() + 1
        expected = training.values()
        save_model(saver, 2, training)
    assert_same(loaded(tmp_path), expected)


def test_a_folder_has_one_saver(tmp_path: Path) -> None:
    with AsyncSaver(tmp_path), pytest.raises(LockError):
        AsyncSaver(tmp_path)
    AsyncSaver(tmp_path).close()
    with pytest.raises(ConfigError, match="URL"):
        AsyncSaver("s3://bucket/run")


@pytest.mark.parametrize("keep", ["2", 1.5, True, None, -1])
def test_a_number_to_keep_is_checked_before_anything_is_written(tmp_path: Path, keep: Any) -> None:
    for way in (
        lambda: AsyncSaver(tmp_path, max_checkpoint_keep=keep),
        lambda: save(tmp_path, torch.nn.Linear(2, 2), iteration=1, max_checkpoint_keep=keep),
        lambda: save_state_dict(tmp_path, {"a": torch.ones(2)}, iteration=1, max_checkpoint_keep=keep),
    ):
        with pytest.raises(ConfigError, match="max_checkpoint_keep is invalid"):
            way()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("patterns", ["*", "weight*", b"*", 3, [3], None])
def test_one_pattern_is_not_taken_letter_by_letter(tmp_path: Path, patterns: Any) -> None:
    for way in (
        lambda: AsyncSaver(tmp_path, from_rank0=patterns),
        lambda: save(tmp_path, torch.nn.Linear(2, 2), iteration=1, from_rank0=patterns),
        lambda: save_state_dict(tmp_path, {"a": torch.ones(2)}, iteration=1, from_rank0=patterns),
    ):
        with pytest.raises(ConfigError, match="from_rank0 is invalid"):
            way()
    assert list(tmp_path.iterdir()) == []


def test_after_a_failed_save_close_frees_the_folder(tmp_path: Path) -> None:
    training, files = Training(), FailingFiles("rename", errno.ENOSPC)
    saver = AsyncSaver(tmp_path, files=files)
    save_model(saver, 1, training)
    with pytest.raises(CheckpointError, match="errno 28"):
        saver.close()
    saver.close()
    AsyncSaver(tmp_path).close()  # the lock is free
    assert not list(tmp_path.glob("iter_*"))


def test_an_error_in_the_loop_lets_the_save_land(tmp_path: Path) -> None:
    training = Training()
    expected = training.values()

    def fail() -> None:
        with AsyncSaver(tmp_path) as saver:
            save_nested(saver, 1, training)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert_same(loaded(tmp_path), expected)
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
            save_model(saver, 1, Training())
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
        save_model(saver, 1, Training())
        patch.setattr(Job, "wait", interrupt)
        patch.setattr(Job, "ends", interrupt)
        with pytest.raises(KeyboardInterrupt):
            saver.close()
    AsyncSaver(tmp_path).close()  # the lock is free
    gate.set()


def test_file_bytes_divide_the_files(tmp_path: Path) -> None:
    state = {"model": {f"w{number}": torch.full((100,), float(number)) for number in range(3)}}
    with AsyncSaver(tmp_path, file_bytes=800) as saver:
        saver.save_state_dict(1, state)
    assert len(list(tmp_path.glob("iter_0000001/model-*.safetensors"))) == 2
    again = {"model": {name: torch.zeros(100) for name in state["model"]}}
    load_state_dict(tmp_path, again)
    assert all(torch.equal(again["model"][name], value) for name, value in state["model"].items())


@ways
def test_a_closed_saver_saves_nothing(tmp_path: Path, save: Save) -> None:
    training = Training()
    saver = AsyncSaver(tmp_path)
    save(saver, 1, training)
    saver.close()
    with pytest.raises(CheckpointError, match="closed saves nothing"):
        save(saver, 2, training)
    saver.close()
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000001"]


def test_a_closed_saver_keeps_neither_tensors_nor_copies(tmp_path: Path) -> None:
    array = np.ones(1000)
    state = {"a": torch.from_numpy(array)}
    saver = AsyncSaver(tmp_path)
    for iteration in (1, 2):
        saver.save_state_dict(iteration, state)
    kept = [weakref.ref(array), weakref.ref(saver._checkpointer._staging.arena._memory.base)]  # type: ignore[arg-type]
    saver.close()
    del array, state
    gc.collect()
    assert [memory() is None for memory in kept] == [True, True]


@pytest.mark.parametrize(
    "limit",
    [
        {"staging_bytes": "1"},
        {"staging_bytes": -1},
        {"stall_timeout_s": "x"},
        {"commit_timeout_s": 0},
        {"commit_timeout_s": math.nan},
    ],
)
def test_a_limit_that_is_none_is_refused_by_name(tmp_path: Path, limit: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(limit))} is invalid"):
        AsyncSaver(tmp_path, **limit)
    assert not list(tmp_path.iterdir())


def test_a_saver_keeps_its_folder_wherever_the_program_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "away" / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with AsyncSaver("run", overwrite=False) as saver:
        monkeypatch.chdir(tmp_path / "away")
        saver.save_state_dict(1, {"a": torch.ones(2)})
        saver.wait()
        with pytest.raises(CheckpointError, match="there already"):
            saver.save_state_dict(1, {"a": torch.ones(2)})
    assert (tmp_path / "run" / "iter_0000001").is_dir()
    assert list((tmp_path / "away" / "run").iterdir()) == []
