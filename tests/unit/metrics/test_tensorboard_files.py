"""What TensorBoard's files keep when a run goes on from an earlier iteration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from torch.utils.tensorboard import SummaryWriter

from reprise.saving import SaveReport
from reprise.storage import FILE_SYSTEM, temporary_of
from tests.fakes import iteration_record
from trainer.metrics import tensorboard_files
from trainer.metrics.run_log import RunLog
from trainer.metrics.tensorboard_files import _parsed, cut_events, put_before


def write(folder: Path, **curves: list[int]) -> Path:
    with SummaryWriter(str(folder)) as writer:
        for tag, steps in curves.items():
            for step in steps:
                writer.add_scalar(tag, float(step), step)
    return max(folder.iterdir())


def points(folder: Path) -> dict[str, list[int]]:
    """Return the iterations of every curve as they lie in the files, whatever a reader makes of doubled ones."""
    found = defaultdict[str, list[int]](list)
    for path in folder.iterdir():
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found[value.tag].append(event.step)
    return {tag: sorted(steps) for tag, steps in found.items()}


def train(log: RunLog, first: int, last: int, *, save_every: int = 4) -> None:
    """Record iterations as the loop does, with an evaluation before every save."""
    for iteration in range(first, last + 1):
        log.iteration(iteration_record(iteration))
        if iteration % save_every == 0:
            log.evaluation(iteration, 2.0, 2.0)
            log.sync()
            log.save(SaveReport(iteration, Path("iter"), 10, 0.5), slowdown_s=0.0)


def opened(folder: Path, after: int, *, owes_evaluation: bool = False) -> RunLog:
    log = RunLog(folder, train_iters=20, log_interval=100, sinks=["tensorboard"], mfu_scale=None)
    log.open(after, "a: 1\n", owes_evaluation=owes_evaluation)
    return log


@pytest.mark.parametrize(
    ("last", "but", "kept"),
    [(3, "", [[1, 2, 3], [2]]), (2, "valid", [[1, 2], []]), (300, "", [[1, 2, 3, 4, 300], [2, 4]])],
)
def test_what_is_beyond_the_iteration_goes_and_the_rest_stays(
    tmp_path: Path, last: int, but: str, kept: list[list[int]]
) -> None:
    path = write(tmp_path, loss=[1, 2, 3, 4, 300], valid=[2, 4], before=[0])
    temporary_of(path).write_bytes(path.read_bytes())  # of a cut that was killed
    before = path.stat()
    cut_events(tmp_path, last, files=FILE_SYSTEM, but=but or None)
    curves = points(tmp_path)
    assert [curves["loss"], curves.get("valid", []), curves["before"]] == [*kept, [0]]
    assert list(tmp_path.iterdir()) == [path]
    if last == 300:  # nothing is cut
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    cut_events(tmp_path / "absent", 3, files=FILE_SYSTEM)
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("data", [b"", b"notes of mine on this run", bytes(range(256)) * 9, bytes(64)])
def test_a_file_that_is_not_of_tensorboard_is_not_touched(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "events.out.tfevents.txt"
    path.write_bytes(data)
    cut_events(tmp_path, 3, files=FILE_SYSTEM)
    assert path.read_bytes() == data


def test_a_record_torn_anywhere_goes(tmp_path: Path) -> None:
    path = write(tmp_path, loss=[1, 2, 3])
    data = path.read_bytes()
    cut_events(tmp_path, 2, files=FILE_SYSTEM)
    kept = path.read_bytes()
    assert data.startswith(kept)
    for length in range(len(kept), len(data)):
        path.write_bytes(data[:length])
        cut_events(tmp_path, 9, files=FILE_SYSTEM)
        assert path.read_bytes() == kept


@pytest.mark.parametrize("last", [1, 150, 397, 400])
def test_a_tail_of_any_length_cuts_what_the_whole_file_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """Saves that end late have their points behind those of later iterations."""
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(1, 401):
            writer.add_scalar("train/loss", float(step), step)
            if step % 10 == 5:
                writer.add_scalar("save/seconds", 1.0, step - 3)
            if step == 200:
                writer.add_text("sample", "a" * 3000, step)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    outcomes = set()
    for tail_bytes in (1 << 20, 5000, 500, 1):
        path.write_bytes(data + data[:20])
        monkeypatch.setattr(tensorboard_files, "_TAIL_BYTES", tail_bytes)
        cut_events(tmp_path, last, files=FILE_SYSTEM)
        outcomes.add(path.read_bytes())
    assert len(outcomes) == 1
    saves = [step for step in range(2, 401, 10) if step <= last]
    assert points(tmp_path).get("save/seconds", []) == saves
    assert points(tmp_path)["train/loss"] == [*range(1, last + 1)]


def test_a_cut_that_is_killed_between_its_calls_is_completed(tmp_path: Path) -> None:
    class Killed(type(FILE_SYSTEM)):  # type: ignore[misc]
        def write(self, descriptor: int, buffers: Sequence[memoryview], *, offset: int) -> None:
            super().write(descriptor, [buffer[: self.most] for buffer in buffers], offset=offset)
            raise KeyboardInterrupt

    with SummaryWriter(str(tmp_path)) as writer:
        for tag, step in [*(("train/loss", step) for step in range(1, 9)), ("save/seconds", 4), ("train/loss", 9)]:
            writer.add_scalar(tag, float(step), step)
    (path,) = tmp_path.iterdir()
    data, files = path.read_bytes(), Killed()
    for files.most in (0, 10, 1000):
        path.write_bytes(data)
        with pytest.raises(KeyboardInterrupt):
            cut_events(tmp_path, 4, files=files)
        cut_events(tmp_path, 4, files=FILE_SYSTEM)
        found = points(tmp_path)
        assert found.pop("save/seconds", [4]) == [4]
        assert found == {"train/loss": [1, 2, 3, 4]}


@given(st.lists(st.integers(min_value=90, max_value=120), max_size=6))
def test_a_later_file_sorts_behind_the_others(seconds: list[int]) -> None:
    with TemporaryDirectory() as folder:
        names = [f"events.out.tfevents.{second:010d}.host.{pid}" for pid, second in enumerate(seconds, start=7)]
        for name in names:
            (Path(folder) / name).write_text(name)
        put_before(Path(folder), 100, FILE_SYSTEM)
        found = sorted(Path(folder).iterdir())
        assert [path.read_text() for path in found] == sorted(names)
        assert all(path.name < "events.out.tfevents.0000000100." for path in found)


def test_a_quick_resume_or_a_clock_set_back_shows_points_once(tmp_path: Path) -> None:
    """TensorBoard reads files by their names, and takes what a file of a later name repeats for a new beginning."""
    for first, last in ((1, 5), (5, 9), (7, 12)):
        log = opened(tmp_path, first - 1)
        train(log, first, last)
        log.close()
        (made,) = set((tmp_path / "tensorboard").iterdir()) - {*(tmp_path / "tensorboard").glob("*.ahead")}
        made.rename(made.with_name(f"events.out.tfevents.{2_000_000_000 - first:010d}.host.1.ahead"))
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 13))


@given(st.integers(min_value=0, max_value=2**63 - 1), st.floats(allow_nan=False))
def test_the_step_of_any_event_is_found(step: int, time: float) -> None:
    events = (
        Event(step=step, wall_time=time, session_log=SessionLog(status=SessionLog.START)),
        Event(step=step, file_version="brain.Event:2"),
    )
    for event in events:
        data = event.SerializeToString()
        assert _parsed(data).step == step
        assert _parsed(Event(file_version="x" * 200).SerializeToString() + data).step == step


def test_a_rewound_run_shows_only_points_of_its_branch_once(tmp_path: Path) -> None:
    train(opened(tmp_path, 0), 1, 14)  # killed, and never closed
    found = points(tmp_path / "tensorboard")
    assert found["save/seconds"] == [4, 8, 12]
    second = opened(tmp_path, 4)
    train(second, 5, 6)
    second.close()
    found = points(tmp_path / "tensorboard")
    assert found["train/loss"] == found["train/lr"] == [1, 2, 3, 4, 5, 6]
    assert found["valid/loss"] == found["save/seconds"] == [4]


def test_an_evaluation_that_is_owed_again_has_one_point(tmp_path: Path) -> None:
    for after in (0, 8, 8):
        log = opened(tmp_path, after, owes_evaluation=after > 0)
        if after:
            log.evaluation(after, 2.0, 2.0)
        train(log, after + 1, after + 8, save_every=100)
        log.close()
    found = points(tmp_path / "tensorboard")
    assert found["valid/loss"] == [8]
    assert found["train/loss"] == list(range(1, 17))


def test_a_run_without_tensorboard_cuts_its_files_too(tmp_path: Path) -> None:
    train(opened(tmp_path, 0), 1, 4)
    log = RunLog(tmp_path, train_iters=20, log_interval=100, sinks=[], mfu_scale=None)
    log.open(2, "a: 1\n")
    log.close()
    assert points(tmp_path / "tensorboard")["train/loss"] == [1, 2]
