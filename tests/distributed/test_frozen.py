"""Frozen parameters keep their bytes, have no optimizer state, and change no bit of the others on any topology."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.harness import TINY, curve, launch, run_ok, tensor_files

TP = "parallel.tensor_model_parallel_size=2"
SP = "parallel.sequence_parallel=true"
PP = "parallel.pipeline_model_parallel_size=2"
VPP = "parallel.num_virtual_stages_per_pipeline_rank=2"
RUN = [*TINY, "model=gpt2_tiny", "model.dropout=0.1", "model.n_layer=4", "train.micro_batch_size=1", "train.threads=1"]
# The first stage of two, with its table, and one of the second: a stage without gradients, and a last one with some.
FROZEN = "train.freeze=['transformer.w?e.weight','transformer.h.[01].*','transformer.h.3.ln_1.*']"
FIRST, LAST = (f"checkpoints/iter_{iteration:07d}" for iteration in (2, 4))
INVARIANT = {
    "zero0": (2, ["parallel.zero_stage=0"]),
    "zero1": (2, ["parallel.zero_stage=1"]),
    "zero2": (2, ["parallel.zero_stage=2"]),
    "zero3": (2, ["parallel.zero_stage=3"]),
    "pp2": (2, [PP]),
    "pp2 vpp2": (2, [PP, VPP]),
    "pp2 zero1": (4, [PP, "parallel.zero_stage=1"]),
    "pp2 vpp2 zero3": (4, [PP, VPP, "parallel.zero_stage=3"]),
}
ROUNDING = {
    "zero0": (2, ["parallel.zero_stage=0"]),
    "zero2": (2, ["parallel.zero_stage=2"]),
    "zero3": (2, ["parallel.zero_stage=3"]),
    "tp2+sp": (2, [TP, SP]),
    "pp2": (2, [PP]),
    "tp2+sp zero3": (4, [TP, SP, "parallel.zero_stage=3"]),
    "pp2 vpp2 zero2": (4, [PP, VPP, "parallel.zero_stage=2"]),
}


def is_frozen(name: str) -> bool:
    starts = ("transformer.wte", "transformer.wpe", "transformer.h.0.", "transformer.h.1.", "transformer.h.3.ln_1.")
    return name.startswith(starts)


def cases(table: dict[str, tuple[int, list[str]]], fast: set[str]) -> list[object]:
    return [pytest.param(name, marks=() if name in fast else [pytest.mark.slow, pytest.mark.nightly]) for name in table]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of one rank with lanes, saved at iterations 2 and 4."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run_ok(folder, [*RUN, FROZEN, "parallel.invariant_ranks=4", "train.train_iters=4", "checkpoint.save_interval=2"])
    return folder


def test_frozen_weights_keep_their_bytes(alone: Path, tmp_path: Path) -> None:
    run_ok(
        tmp_path / "begin", [*RUN, "train.train_iters=4", "optimizer.lr=0.0", "schedule.min_lr=0.0"]
    )  # the initial values
    before = load_file(tmp_path / "begin" / LAST / "model.safetensors")
    after = load_file(alone / LAST / "model.safetensors")
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert changed == {name for name in before if not is_frozen(name)}


def test_frozen_weights_have_no_optimizer_state(alone: Path) -> None:
    (file,) = (alone / LAST / "optimizer").iterdir()
    kept = {name.partition(".")[2] for name in load_file(file)}
    assert kept == {name for name in load_file(alone / LAST / "model.safetensors") if not is_frozen(name)}


@pytest.mark.parametrize("case", cases(INVARIANT, {"zero3", "pp2 vpp2"}))
def test_every_topology_has_the_bits_of_one_rank(alone: Path, tmp_path: Path, case: str) -> None:
    ranks, axes = INVARIANT[case]
    run = [*RUN, FROZEN, "parallel.invariant_ranks=4", "train.train_iters=4", "checkpoint.save_interval=2"]
    run_ok(tmp_path / "run", [*run, *axes], ranks=ranks)
    assert curve(tmp_path / "run") == curve(alone)
    assert tensor_files(tmp_path / "run" / LAST) == tensor_files(alone / LAST)


@pytest.fixture(scope="module")
def by_library(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of one rank without lanes or dropout."""
    folder = tmp_path_factory.mktemp("library") / "run"
    run_ok(folder, [*RUN, FROZEN, "model.dropout=0.0", "train.train_iters=4"])
    return [float.fromhex(row[1]) for row in curve(folder)]


@pytest.mark.parametrize("case", cases(ROUNDING, {"zero0", "tp2+sp", "pp2"}))
def test_every_topology_has_the_curve_of_one_rank(by_library: list[float], tmp_path: Path, case: str) -> None:
    ranks, axes = ROUNDING[case]
    run_ok(tmp_path / "run", [*RUN, FROZEN, "model.dropout=0.0", "train.train_iters=4", *axes], ranks=ranks)
    losses = [float.fromhex(row[1]) for row in curve(tmp_path / "run")]
    assert losses == pytest.approx(by_library, rel=2e-5)


def test_a_resume_with_other_frozen_names_is_refused(alone: Path, tmp_path: Path) -> None:
    run = [*RUN, "parallel.invariant_ranks=4", "train.train_iters=4", f"checkpoint.load={alone / FIRST}"]
    refused = launch(tmp_path / "refused", run)
    assert not refused.ok
    assert "checkpoint.override_freeze=true" in refused.text
    # Other patterns for the same names are no difference.
    same = "train.freeze=['transformer.w[tp]e.*',transformer.h.0.*,transformer.h.1.*,transformer.h.3.ln_1.*]"
    run_ok(tmp_path / "same", [*run, same])
    assert curve(tmp_path / "same") == curve(alone)[2:]
    assert tensor_files(tmp_path / "same" / LAST) == tensor_files(alone / LAST)


def test_freezing_may_change_on_a_resume(alone: Path, tmp_path: Path) -> None:
    thawed = ["train.freeze=[transformer.h.2.*]", "checkpoint.override_freeze=true", "train.train_iters=4"]
    run = [*RUN, "parallel.invariant_ranks=4", f"checkpoint.load={alone / FIRST}", *thawed]
    run_ok(tmp_path / "run", run)
    before, after = (
        load_file(alone / FIRST / "model.safetensors"),
        load_file(tmp_path / "run" / LAST / "model.safetensors"),
    )
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert changed == {name for name in before if not name.startswith("transformer.h.2.")}
    (file,) = (tmp_path / "run" / LAST / "optimizer").iterdir()
    steps = {name: value.item() for name, value in load_file(file).items() if name.startswith("step.")}
    assert steps["step.transformer.wte.weight"] == 2
    assert steps["step.transformer.ln_f.weight"] == 4
    assert not [name for name in steps if "h.2." in name]


def test_muon_leaves_frozen_matrices_alone(tmp_path: Path) -> None:
    run = [*RUN, "optimizer=muon", "train.freeze=[transformer.h.*.mlp.*]", "train.train_iters=4"]
    run_ok(tmp_path / "run", run)
    (file,) = (tmp_path / "run" / LAST / "optimizer").iterdir()
    kept = set(load_file(file))
    assert "momentum_buffer.transformer.h.0.attn.c_attn.weight" in kept
    assert not [name for name in kept if ".mlp." in name]
