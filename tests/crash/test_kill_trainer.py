"""The trainer itself, killed at calls to the file system, resumes bit by bit. `matrix.py` kills at every call."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import trainer.__main__
from reprise.folder import iteration_name
from tests.crash.killing import AFTER, BEFORE, Killer
from tests.harness import DEADLINE_S, TINY, call_on_ranks, curve, run_ok, started, tensor_files

ITERATIONS = 6
BASE = (
    "model=gpt2_tiny",
    *TINY,
    "model.dropout=0.1",
    f"train.train_iters={ITERATIONS}",
    "checkpoint.save_interval=2",
    "checkpoint.max_checkpoint_keep=1",
)
LAYOUTS = {
    "one rank": (1, ()),
    "zero1": (2, ()),
    "zero3": (2, ("parallel.zero_stage=3",)),
    "tp2": (2, ("parallel.tensor_model_parallel_size=2",)),
    "weights alone too": (1, ("checkpoint.save_steps=[0,1,3]", "checkpoint.save_weights_interval=2")),
}


def main(arguments: list[str]) -> None:
    """Run the trainer's command; one rank dies at a call below the run's folder, or leaves how many it made."""
    told = json.loads(arguments[0])
    rank = int(os.environ.get("RANK", "0"))
    run = Path(told["run"])
    at = told["at"] if rank == told["victim"] else None
    killer = Killer(run, notes=run.with_name("notes"), at=at, when=told["when"])
    killer.install()
    sys.argv = ["trainer", f"run.dir={run}", *arguments[1:]]
    trainer.__main__.main()
    run.with_name(f"calls{rank}").write_text(str(len(killer.calls)))


def told(run: Path, *, victim: int = 0, at: int | None = None, when: str = BEFORE) -> str:
    return json.dumps({"run": str(run), "victim": victim, "at": at, "when": when})


def weights_of(run: Path) -> dict[str, dict[str, bytes]]:
    """Return the tensor files of every save of the weights alone."""
    folder = run / "checkpoints/weights"
    found = [folder / iteration_name(iteration) for iteration in range(ITERATIONS + 1)]
    return {path.name: tensor_files(path) for path in found if path.exists()}


def kill_at_some(folder: Path, layout: str, kills: int) -> None:
    ranks, overrides = LAYOUTS[layout]
    settings = [*BASE, *overrides]
    unbroken = folder / "unbroken/run"
    unbroken.parent.mkdir()
    ended = call_on_ranks(main, [told(unbroken), *settings], folder=unbroken, ranks=ranks)
    assert ended.ok, ended.text
    last = f"checkpoints/iter_{ITERATIONS:07d}"
    for number in range(kills):
        victim = number % ranks
        calls = int((unbroken.parent / f"calls{victim}").read_text())
        run = folder / f"killed-{number}/run"
        run.parent.mkdir()
        at = (2 * number + 1) * calls // (2 * kills)
        arguments = [told(run, victim=victim, at=at, when=(BEFORE, AFTER)[number // 2 % 2]), *settings]
        with started(main, arguments, folder=run, ranks=ranks) as running:
            running.processes[victim].join(DEADLINE_S)
        assert running.ended().statuses[victim] == -9, running.ended().text
        run_ok(run, settings, ranks=ranks)
        assert curve(run) == curve(unbroken)
        assert tensor_files(run / last) == tensor_files(unbroken / last)
        assert weights_of(run) == weights_of(unbroken)
        left = [path.name for path in (run / "checkpoints").rglob(".*")]
        assert left == []


def test_a_kill_of_the_trainer_is_survived(tmp_path: Path) -> None:
    kill_at_some(tmp_path, "one rank", 1)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one rank", "weights alone too"])
def test_kills_of_the_trainer_are_survived(tmp_path: Path, layout: str) -> None:
    kill_at_some(tmp_path, layout, 4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero3", pytest.param("tp2", marks=pytest.mark.nightly)])
def test_a_kill_of_one_of_two_ranks_of_the_trainer_is_survived(tmp_path: Path, layout: str) -> None:
    kill_at_some(tmp_path, layout, 2)
