"""A run that was interrupted keeps the checkpoints of the unbroken run, with the same records."""

from __future__ import annotations

from pathlib import Path

import pytest

from reprise.storage import CheckpointFolder, Files
from tests.crash.moments import DEADLINE_S, standing
from tests.harness import TINY, run_ok, state_of, tensor_files
from tests.resume.differential import rows_of

BASE = (
    "model=gpt2_tiny",
    *TINY,
    "train.train_iters=12",
    "train.eval_interval=2",
    "train.eval_iters=2",
    "checkpoint.save_interval=4",
    "checkpoint.max_checkpoint_keep=1",
    "checkpoint.keep_best=1",
    "checkpoint.save_retain_interval=5",
    "checkpoint.save_weights_interval=2",
    "checkpoint.weights_keep=2",
)


def records(folder: Path) -> dict[int, dict[str, object]]:
    """Return the record of every checkpoint in a folder by iteration, without the id of its run."""
    found = CheckpointFolder(folder, Files())
    assert found.superseded() == []
    paths = {iteration: found.iteration(iteration) for iteration in found.committed()}
    return {iteration: state_of(path) for iteration, path in paths.items()}


def assert_same(run: Path, whole: Path) -> None:
    for folder in ("checkpoints", "checkpoints/weights"):
        assert records(run / folder) == records(whole / folder)
        for path in (run / folder).glob("iter_*"):
            assert tensor_files(path) == tensor_files(whole / folder / path.name)
    assert rows_of(run) == rows_of(whole)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    run_ok(run, BASE)
    return run


@pytest.mark.slow
def test_what_interruptions_leave_goes_with_the_next_due_save(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_ok(run, [*BASE, "train.exit_interval=5"])
    assert sorted(records(run / "checkpoints")) == [4, 5]
    run_ok(run, [*BASE, "train.exit_interval=3"])
    assert sorted(records(run / "checkpoints")) == [4, 6]  # one of max_checkpoint_keep=1, beside that of the schedule
    run_ok(run, [*BASE, "train.exit_interval=10"])
    assert records(run / "checkpoints")[10]["interim"] is True
    assert 6 not in records(run / "checkpoints")
    run_ok(run, BASE)
    assert_same(run, whole)


@pytest.mark.parametrize("iteration", [6, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 12))])
def test_an_interrupted_evaluation_leaves_the_record_of_none(whole: Path, tmp_path: Path, iteration: int) -> None:
    run = tmp_path / "run"
    with standing(run, BASE, moment="evaluation", iteration=iteration) as (running, gate):
        gate.await_reached()
        running.send(0, 15)
        gate.await_heard([0])
        gate.open()
        running.join(DEADLINE_S)
    assert running.ended().ok, running.ended().text
    assert records(run / "checkpoints")[iteration]["owes_evaluation"] is True
    run_ok(run, BASE)
    assert_same(run, whole)
