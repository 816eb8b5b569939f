"""A signal at any moment: all ranks save the same iteration once, exit 0, and the resumed run is the unbroken one."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.crash.moments import DEADLINE_S, await_true, standing
from tests.crash.outcomes import assert_ends_as, rows, saved
from tests.harness import TINY, Ended, all_files, checkpoint, last_iteration, launch, run_ok
from tests.profiles import nightly

BASE = (
    "model=gpt2_tiny",
    *TINY,
    "train.train_iters=8",
    "model.dropout=0.1",
    "train.eval_interval=2",
    "train.eval_iters=3",
    "checkpoint.save_interval=4",
)
INLINE = "checkpoint.async_save=false"
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "zero1": (2, ()),
    "zero3": (2, ("parallel.zero_stage=3",)),
    "tp2": (2, ("parallel=tp2",)),
    "pp2": (2, ("parallel=pp2",)),
}


def evaluations(run: Path) -> list[tuple[int, str]]:
    return [(row["iteration"], row["valid_loss_hex"]) for row in rows(run, "evaluation")]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of the unbroken run of each layout, made when first asked for."""
    root = tmp_path_factory.mktemp("unbroken")

    class Runs(dict[str, Path]):
        def __missing__(self, layout: str) -> Path:
            ranks, overrides = LAYOUTS[layout]
            self[layout] = root / layout.replace(" ", "_")
            run_ok(self[layout], [*BASE, *overrides], ranks=ranks)
            return self[layout]

    return Runs()


def assert_resumes(run: Path, whole: Path, layout: str = "one rank") -> None:
    """Resume a run and hold it to the unbroken one, bit by bit."""
    ranks, overrides = LAYOUTS[layout]
    run_ok(run, [*BASE, *overrides], ranks=ranks)
    assert_ends_as(run, whole)
    assert evaluations(run) == evaluations(whole)


def interrupt(
    run: Path, number: signal.Signals, *, layout: str, moment: str, iteration: int, to: Sequence[int], **places: Path
) -> Ended:
    """Train, send a signal to ranks at a moment, and return how the ranks ended."""
    ranks, overrides = LAYOUTS[layout]
    if moment == "inline prepare":
        moment, overrides = "prepare", (*overrides, INLINE)
    gated = [0] if moment == "prepare" else range(ranks)
    at: dict[str, Any] = {"moment": moment, "iteration": iteration, "ranks": ranks, "gated": gated, **places}
    with standing(run, [*BASE, *overrides], **at) as (running, gate):
        gate.await_reached()
        for rank in to:
            running.send(rank, number)
        gate.await_heard(to)
        gate.open()
        running.join(DEADLINE_S)
    return running.ended()


TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
CASES = [
    # layout, moment, iteration of the moment, signal, to whom, what is saved in the end
    ("one rank", "forward", 3, TERM, [0], [3]),
    ("zero1", "evaluation", 2, USR1, [1], [2]),
]
FURTHER = [
    ("one rank", "prepare", 4, USR1, [0], [4, 5]),
    ("one rank", "inline prepare", 4, TERM, [0], [4, 5]),
    ("zero3", "forward", 5, USR1, [0], [4, 5]),
    ("pp2", "evaluation", 6, TERM, [0, 1], [4, 6]),
    ("tp2", "step", 6, TERM, [1], [4, 6]),
    ("tp2", "inline prepare", 4, USR1, [0, 1], [4, 5]),
    ("zero1", "forward", 3, signal.SIGHUP, [0, 1], [3]),
    ("zero1", "forward", 3, signal.SIGUSR2, [1], [3]),
    ("one rank", "forward", 5, signal.SIGXCPU, [0], [4, 5]),
]


@pytest.mark.parametrize(
    ("layout", "moment", "iteration", "number", "to", "left"),
    [*CASES, *(nightly(*case) for case in FURTHER)],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else str(value).replace(" ", ""),
)
def test_a_signal_saves_once_and_the_run_resumes_bitwise(
    unbroken: dict[str, Path],
    tmp_path: Path,
    layout: str,
    moment: str,
    iteration: int,
    number: signal.Signals,
    to: Sequence[int],
    left: list[int],
) -> None:
    run = tmp_path / "run"
    ended = interrupt(run, number, layout=layout, moment=moment, iteration=iteration, to=to)
    assert ended.statuses == (0,) * LAYOUTS[layout][0], ended.text
    assert last_iteration(run / "metrics.jsonl") == saved(run)[-1]
    if moment == "prepare":  # in the background: how far training came meanwhile is not told
        left = [*left[:-1], saved(run)[-1]]
    assert saved(run) == left, ended.text
    assert not list((run / "checkpoints").glob(".*"))
    if moment == "evaluation":
        state = json.loads((checkpoint(run, iteration) / "trainer_state.json").read_text())
        assert state["owes_evaluation"] is True
        assert iteration not in dict(evaluations(run))
    assert_resumes(run, unbroken[layout], layout)


@pytest.mark.slow
def test_an_evaluation_may_be_broken_off_again_and_again(unbroken: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("first", "second"):
        at: dict[str, Any] = {"layout": "one rank", "moment": "evaluation", "iteration": 2, "to": [0]}
        assert interrupt(run, TERM, **at, gates=tmp_path / name).ok
        assert (saved(run), last_iteration(run / "metrics.jsonl"), evaluations(run)) == ([2], 2, [])
    without = tmp_path / "without"  # an evaluation: a run may go on so from a broken one
    shutil.copytree(run, without)
    run_ok(without, [*BASE, "train.eval_interval=0"])
    assert (last_iteration(without / "metrics.jsonl"), evaluations(without)) == (8, [])
    # Done at last, and then the run dies before its next save: the evaluation is done again, and recorded once.
    launch(run, BASE, kill_after=3)
    assert saved(run) == [2]
    assert_resumes(run, unbroken["one rank"])


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "number"), [("build", TERM), ("load", INT), nightly("load", USR1)])
def test_a_signal_before_the_first_iteration_changes_nothing(
    tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    run_ok(run, [*BASE, "train.exit_interval=4"], ranks=2)
    before = all_files(run)
    with standing(run, BASE, moment=moment, ranks=2) as (running, gate):
        gate.await_reached()
        running.send(1, number)
        running.join(DEADLINE_S, but=[0])
        gate.open()
        running.join(DEADLINE_S)
    ended = running.ended()
    assert ended.statuses == (1, 128 + number), ended.text
    assert f"received {number.name} before the first iteration" in ended.outputs[0]
    locks = {"lock": b"", "checkpoints/lock": b""}
    assert all_files(run) | locks == before | locks


@pytest.mark.slow
def test_a_second_signal_ends_the_process_and_soon_its_peers(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with standing(run, [*BASE, INLINE], moment="prepare", iteration=4, ranks=2, gated=[0]) as (running, gate):
        gate.await_reached()
        start = time.monotonic()

        def has_ended() -> bool:
            with contextlib.suppress(ProcessLookupError):  # it ended after the last look
                running.send(0, TERM)
            running.processes[0].join(0.05)
            return running.processes[0].exitcode is not None

        await_true(has_ended)
        seconds = time.monotonic() - start
        running.join(DEADLINE_S)
    ended = running.ended()
    assert ended.statuses == (128 + TERM, 1), ended.text
    assert seconds >= 2.0  # until then another signal is the same wish
    assert "SIGTERM after SIGTERM" in ended.outputs[0]
    assert "rank 0" in ended.outputs[1].lower()
    assert list((run / "checkpoints").glob("iter_*")) == []


@pytest.mark.slow
def test_a_run_whose_time_is_over_saves_and_the_next_goes_on(unbroken: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = run_ok(run, [*BASE, "train.exit_duration_in_mins=0.0005"], ranks=2)
    assert saved(run) == [1]
    assert "after iteration 1: its time limit" in ended.outputs[0]
    assert_resumes(run, unbroken["zero1"], "zero1")
