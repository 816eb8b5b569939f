"""Each family and optimizer: a resume has the same bits, and every topology writes the same files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.harness import TINY, curve, run_ok, tensor_files

RUN = [*TINY, "schedule.lr_decay_iters=40"]
CASES: dict[str, list[str]] = {
    "qwen3": ["model=qwen3_tiny", "model.n_kv_head=2", "model.head_dim=14"],
    "muon": ["model=gpt2_tiny", "model.dropout=0.1", "optimizer=muon"],
}
_TP = "parallel.tensor_model_parallel_size=2"
_ZERO3 = "parallel.zero_stage=3"
TOPOLOGIES: dict[str, tuple[int, list[str]]] = {
    "1": (1, []),
    "zero3": (2, [_ZERO3]),
    "tp2": (2, [_TP]),
    "tp2+sp zero3": (4, [_TP, _ZERO3, "parallel.sequence_parallel=true"]),
}
START, SAVED, END = 3, 5, 7
FIRST, MIDDLE, LAST = (f"checkpoints/iter_{iteration:07d}" for iteration in (START, SAVED, END))


@pytest.fixture(scope="module")
def origins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return, for each case, a run of one rank up to START."""
    found = {}
    for name, overrides in CASES.items():
        found[name] = tmp_path_factory.mktemp("origin") / name
        run_ok(found[name], [*overrides, *RUN, f"train.train_iters={START}"])
    return found


@pytest.mark.parametrize("topology", [pytest.param(t, marks=pytest.mark.slow if "+" in t else ()) for t in TOPOLOGIES])
@pytest.mark.parametrize("case", CASES)
def test_a_resume_is_bitwise_and_files_are_those_of_one_rank(
    origins: dict[str, Path], tmp_path: Path, case: str, topology: str
) -> None:
    ranks, axes = TOPOLOGIES[topology]
    run = [*CASES[case], *RUN, *axes, "checkpoint.reshard=true"]
    again, broken = tmp_path / "run", tmp_path / "broken"
    run_ok(again, [*run, f"train.train_iters={START}", f"checkpoint.load={origins[case] / FIRST}"], ranks=ranks)
    assert tensor_files(again / FIRST) == tensor_files(origins[case] / FIRST)

    run_ok(again, [*run, f"train.train_iters={END}", f"checkpoint.save_interval={SAVED}"], ranks=ranks)
    run_ok(broken, [*run, f"train.train_iters={END}", f"checkpoint.load={again / MIDDLE}"], ranks=ranks)
    assert [row[0] for row in curve(again)] == list(range(START + 1, END + 1))
    assert curve(broken) == [row for row in curve(again) if row[0] > SAVED]
    assert tensor_files(broken / LAST) == tensor_files(again / LAST)
    shutil.rmtree(broken)


@pytest.mark.parametrize("case", CASES)
def test_axes_train_the_curve_of_one_rank(origins: dict[str, Path], tmp_path: Path, case: str) -> None:
    found = {}
    for topology in ("1", "zero3", "tp2"):
        ranks, axes = TOPOLOGIES[topology]
        end = [
            "model.dropout=0.0",
            f"train.train_iters={END}",
            f"checkpoint.load={origins[case] / FIRST}",
            "checkpoint.reshard=true",
            "checkpoint.override_dropout=true",
        ]
        run_ok(tmp_path / topology, [*CASES[case], *RUN, *axes, *end], ranks=ranks)
        found[topology] = [float.fromhex(row[1]) for row in curve(tmp_path / topology)]
    for topology, losses in found.items():
        # Sums in another order: float32 rounding, and what the optimizer makes of it in three further iterations.
        assert losses == pytest.approx(found["1"], rel=2e-5), topology
