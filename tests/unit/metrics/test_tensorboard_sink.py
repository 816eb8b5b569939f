"""What TensorBoard shows when a run goes on from an earlier iteration."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from reprise.saving import SaveReport
from tests.fakes import iteration_record
from trainer.metrics.run_log import RunLog
from trainer.metrics.tensorboard_sink import TensorboardSink


def points(folder: Path) -> dict[str, list[int]]:
    """Return the iterations of every curve that TensorBoard shows."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def train(folder: Path, first: int, last: int, *, is_killed: bool = False) -> None:
    """Record iterations as the loop does, with an evaluation before every fourth save."""
    log = RunLog(folder, train_iters=20, sinks=[TensorboardSink()], mfu_scale=None)
    log.open(first - 1, "a: 1\n")
    for iteration in range(first, last + 1):
        log.iteration(iteration_record(iteration))
        if iteration % 4 == 0:
            log.evaluation(iteration, 2.0, 2.0)
            log.sync()
            for event in ("local_save", "save"):
                log.save(SaveReport(iteration, Path("iter"), 10, 0.5), slowdown_s=0.0, event=event)
    if is_killed:
        log.sync()
    else:
        log.close()


def test_a_rewound_run_shows_only_points_of_its_branch_once(tmp_path: Path) -> None:
    """Also where the clock of the host before was ahead."""
    train(tmp_path, 1, 14, is_killed=True)
    (events,) = (tmp_path / "tensorboard").iterdir()
    events.rename(events.with_name("events.out.tfevents.2000000000.host.1"))
    train(tmp_path, 5, 6)
    shown = points(tmp_path)
    assert min(shown) == "loss/train"
    assert shown["loss/train"] == shown["train/lr"] == shown["train/blocked_seconds"] == [1, 2, 3, 4, 5, 6]
    assert shown["loss/valid"] == shown["save/seconds"] == [4]
    assert {tag.partition("/")[0] for tag in shown} == {"loss", "train", "save"}
