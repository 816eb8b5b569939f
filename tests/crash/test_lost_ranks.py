"""A rank that is killed or hangs at any moment: the others end in bounded time, with a status, and name it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.moments import KILLED, STOPPED, standing
from tests.harness import TINY, run_ok

TIMEOUT_S = 3.0
# Some wait twice; beside that there are the roll call, the farewell and a rank's grace.
BOUND_S = 2 * TIMEOUT_S + 15.0
BASE = (
    "model=gpt2_tiny",
    *TINY,
    "train.train_iters=4",
    "checkpoint.save_interval=2",
    f"train.distributed_timeout_minutes={TIMEOUT_S / 60}",
    "checkpoint.commit_timeout_s=2",
)
ZERO3 = ("parallel.zero_stage=3",)
TP2 = ("parallel.tensor_model_parallel_size=2",)
PP2 = ("parallel.pipeline_model_parallel_size=2",)
CASES = [
    # moment, what becomes of the rank, which rank, topology
    ("meet", KILLED, 1, ()),
    ("meet", KILLED, 0, ()),
    ("meet", STOPPED, 1, ()),
    ("meet", STOPPED, 0, ()),
    ("group", KILLED, 1, ()),
    ("group", STOPPED, 1, ()),
    ("data", KILLED, 1, ()),
    ("data", STOPPED, 1, ()),
    ("build", KILLED, 1, ()),
    ("build", STOPPED, 1, ()),
    ("load", KILLED, 1, ()),
    ("load", STOPPED, 1, ()),
    ("forward", KILLED, 1, ()),
    ("forward", KILLED, 0, ZERO3),
    ("forward", KILLED, 1, PP2),
    ("forward", STOPPED, 1, ZERO3),
    ("forward", STOPPED, 1, TP2),
    ("forward", STOPPED, 0, PP2),
    ("save", KILLED, 1, ()),
    ("save", STOPPED, 1, ()),
    ("publish", STOPPED, 0, ()),
    ("exit", KILLED, 1, ()),
    ("exit", STOPPED, 1, ()),
]
QUICK = ("forward", KILLED, 1, ())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint to load."""
    run = tmp_path_factory.mktemp("saved") / "run"
    run_ok(run, [*BASE, "train.exit_interval=2"])
    return run / "checkpoints/iter_0000002"


@pytest.mark.parametrize(
    ("moment", "deed", "lost", "topology"),
    [pytest.param(*case, marks=() if case == QUICK else pytest.mark.slow) for case in CASES],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_the_others_end_soon_and_name_the_lost_rank(
    saved: Path, tmp_path: Path, moment: str, deed: str, lost: int, topology: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    overrides = [
        *BASE,
        *topology,
        *([f"checkpoint.load={saved}", "checkpoint.reshard=true"] if moment == "load" else []),
    ]
    iteration = {"forward": 2, "save": 2, "publish": 2}.get(moment, 0)
    with standing(run, overrides, moment=moment, iteration=iteration, ranks=2, gated=[lost], deed=deed) as found:
        running, gate = found
        gate.await_reached()
        running.join(BOUND_S, but=[lost])
        left = running.ended()
    other = 1 - lost
    assert left.statuses[other] == 1, left.text
    assert f"rank {lost}" in left.outputs[other].lower(), left.text
    for name in ("model.safetensors", "manifest.json"):
        assert all((path / name).exists() for path in run.glob("checkpoints/iter_*"))


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("deed", [KILLED, STOPPED])
def test_a_rank_lost_after_the_last_barrier_holds_nobody(tmp_path: Path, deed: str, lost: int) -> None:
    run = tmp_path / "run"
    with standing(run, BASE, moment="farewell", ranks=2, gated=[lost], deed=deed) as (running, gate):
        gate.await_reached()
        running.join(BOUND_S, but=[lost])
        ended = running.ended()
    assert ended.statuses[1 - lost] == 0, ended.text
    assert (run / "checkpoints/iter_0000004/manifest.json").exists()
