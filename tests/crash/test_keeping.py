"""What stays and what is asked for in runs of the trainer: the best by validation loss, held ones, saves on request."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import pytest

import trainer.__main__
import trainer.run.build
import trainer.training.loop
from reprise.files import Files
from reprise.folder import HOLD, TRACKER, CheckpointFolder, iteration_name
from tests.harness import DEADLINE_S, TINY, Ended, around_iterations, curve, started
from trainer.launch.control import SAVE_NOW, RunControl
from trainer.run.build import Run

TWO = pytest.param(2, marks=pytest.mark.slow)
BASE = ("model=gpt2_tiny", *TINY, "train.train_iters=8", "schedule.lr_decay_iters=12", "checkpoint.save_interval=1")
# Losses of iterations 1 to 12 as they are made up: 3 and 6 are the best of the first eight, 9 and 3 of all.
LOSSES = (9.0, 5.0, 1.5, 4.0, 6.0, 2.0, 7.0, 8.0, 1.0, 3.0, 3.5, 3.6)


def committed(run: Path) -> list[int]:
    return CheckpointFolder(run / "checkpoints", Files()).committed()


def train_told(arguments: list[str]) -> None:
    """Run the trainer's command, told in JSON what to do at which iteration; see `_ACTS`."""
    told, *overrides = arguments
    for name, value in json.loads(told).items():
        _ACTS[name](value)
    sys.argv = ["trainer", *overrides]
    trainer.__main__.main()


def _evaluate_as_told(losses: Sequence[float]) -> None:
    trainer.training.loop.evaluate = lambda state, *_, **__: losses[state.progress.iteration - 1]


def _touch_before(names: dict[str, str]) -> None:
    def act(run: Run, iteration: int) -> None:
        name = names.get(str(iteration))
        if name is not None and run.cluster.rank == 0:
            for target in run.saves:
                target.saver.wait()
            Path(str(run.config.checkpoint.save), name).touch()

    _set_clock(count(1000.0, 10.0).__next__)  # so that each iteration is seconds after the last look at the files
    around_iterations(before=act)


def _pass_time(seconds: dict[str, float]) -> None:
    now = [1000.0]

    def act(_: Run, iteration: int) -> None:
        now[0] += seconds.get(str(iteration), 0.0)

    _set_clock(lambda: now[0])
    around_iterations(before=act)


def _set_clock(clock: Callable[[], float]) -> None:
    """Let the run that this process starts read the time from `clock`."""
    trainer.run.build.RunControl = partial(RunControl, clock=clock)  # type: ignore[assignment, misc]


_ACTS: dict[str, Callable[..., None]] = {
    "losses": _evaluate_as_told,
    "touch": _touch_before,
    "seconds": _pass_time,
}


def train(run: Path, told: dict[str, object], *overrides: str, ranks: int = 1) -> Ended:
    arguments = [json.dumps(told), f"run.dir={run}", *BASE, *overrides]
    with started(train_told, arguments, folder=run, ranks=ranks) as running:
        running.join(DEADLINE_S)
    ended = running.ended()
    assert ended.ok, ended.text
    return ended


@pytest.mark.parametrize("ranks", [1, TWO])
def test_the_best_by_validation_loss_stay_also_over_a_resume(tmp_path: Path, ranks: int) -> None:
    run, told = tmp_path / "run", {"losses": LOSSES}
    keep = ("checkpoint.keep_best=2", "checkpoint.max_checkpoint_keep=1", "train.eval_interval=1")
    train(run, told, *keep, ranks=ranks)
    assert committed(run) == [3, 6, 8]
    # 9 drives out 6, which the first job kept.
    train(run, told, *keep, "train.train_iters=12", ranks=ranks)
    assert committed(run) == [3, 9, 12]
    state = json.loads((run / "checkpoints" / iteration_name(9) / "trainer_state.json").read_text())
    assert (state["valid_loss"], state["best_loss"]) == (1.0, 1.0)


def test_a_save_without_an_evaluation_is_not_among_the_best(tmp_path: Path) -> None:
    run = tmp_path / "run"
    keep = ("checkpoint.keep_best=2", "checkpoint.max_checkpoint_keep=1", "train.eval_interval=2")
    train(run, {"losses": LOSSES}, *keep)
    assert committed(run) == [4, 6, 8]  # 3 has the best loss of all, and nobody asked for it


@pytest.mark.parametrize("ranks", [1, TWO])
def test_a_held_checkpoint_outlasts_retention_until_it_is_let_go(tmp_path: Path, ranks: int) -> None:
    run = tmp_path / "run"
    hold = {"touch": {"4": f"{iteration_name(3)}/{HOLD}"}}
    keep = ("checkpoint.max_checkpoint_keep=1", "checkpoint.async_save=false")
    train(run, hold, *keep, ranks=ranks)
    assert committed(run) == [3, 8]
    train(run, {}, *keep, "train.train_iters=10", ranks=ranks)
    assert committed(run) == [3, 10]
    (run / "checkpoints" / iteration_name(3) / HOLD).unlink()
    train(run, {}, *keep, "train.train_iters=12", ranks=ranks)
    assert committed(run) == [12]


def test_a_held_checkpoint_is_loaded_as_any_other(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, {})
    (run / "checkpoints" / iteration_name(8) / HOLD).touch()
    ended = train(run, {}, "train.train_iters=9")
    assert "iteration 8 from" in ended.text


@pytest.mark.parametrize("ranks", [1, TWO])
def test_save_now_saves_without_stopping_and_is_taken_away(tmp_path: Path, ranks: int) -> None:
    run, unbroken = tmp_path / "run", tmp_path / "unbroken"
    rare = ("checkpoint.save_interval=5",)
    train(unbroken, {}, *rare, ranks=ranks)
    ended = train(run, {"touch": {"3": SAVE_NOW, "7": SAVE_NOW}}, *rare, ranks=ranks)
    assert committed(unbroken) == [5, 8]
    assert committed(run) == [3, 5, 7, 8]
    assert "stopping" not in ended.text
    assert sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_file()) == [TRACKER, "lock"]
    assert curve(run) == curve(unbroken)


@pytest.mark.parametrize("ranks", [1, TWO])
def test_a_save_is_due_after_so_many_minutes_of_training(tmp_path: Path, ranks: int) -> None:
    run = tmp_path / "run"
    # Time passes: 59 s of training before iteration 3, 2 s more before 4, and 61 s after the save of that.
    seconds = {"1": 50.0, "3": 9.0, "4": 2.0, "6": 61.0}
    rules = ("checkpoint.save_interval=0", "checkpoint.save_interval_mins=1")
    train(run, {"seconds": seconds}, *rules, ranks=ranks)
    assert committed(run) == [4, 6, 8]
