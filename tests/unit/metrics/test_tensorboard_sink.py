"""What TensorBoard shows when a run goes on from an earlier iteration."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from reprise.saving import SaveReport
from reprise.storage import FILE_SYSTEM
from tests.fakes import iteration_record
from trainer.metrics.run_log import RunLog
from trainer.metrics.tensorboard_sink import put_before


def points(folder: Path) -> dict[str, list[int]]:
    """Return the iterations of every curve that TensorBoard shows."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def train(folder: Path, first: int, last: int, *, is_killed: bool = False) -> None:
    """Record iterations as the loop does, with an evaluation before every fourth save."""
    log = RunLog(folder, train_iters=20, log_interval=100, sinks=["tensorboard"], mfu_scale=None)
    log.open(first - 1, "a: 1\n")
    for iteration in range(first, last + 1):
        log.iteration(iteration_record(iteration))
        if iteration % 4 == 0:
            log.evaluation(iteration, 2.0, 2.0)
            log.sync()
            log.save(SaveReport(iteration, Path("iter"), 10, 0.5), slowdown_s=0.0)
    if is_killed:
        log.sync()
    else:
        log.close()


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


def test_a_rewound_run_shows_only_points_of_its_branch_once(tmp_path: Path) -> None:
    """Also where the clock of the host before was ahead."""
    train(tmp_path, 1, 14, is_killed=True)
    (events,) = (tmp_path / "tensorboard").iterdir()
    events.rename(events.with_name("events.out.tfevents.2000000000.host.1"))
    train(tmp_path, 5, 6)
    shown = points(tmp_path)
    assert min(shown) == "loss/train"
    assert shown["loss/train"] == shown["train/lr"] == [1, 2, 3, 4, 5, 6]
    assert shown["loss/valid"] == shown["save/seconds"] == [4]
