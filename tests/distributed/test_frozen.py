"""Frozen parameters keep their bytes and have no optimizer state.

`test_invariant_ranks.py` and `test_topologies.py` have them on every topology.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.harness import TINY, curve, launch, run_ok, tensor_files

RUN = [*TINY, "model=gpt2_tiny", "model.dropout=0.1", "model.n_layer=4", "train.train_iters=4", "train.threads=1"]
FROZEN = "train.freeze=['transformer.w?e.weight','transformer.h.[01].*','transformer.h.3.ln_1.*']"
FIRST, LAST = (f"checkpoints/iter_{iteration:07d}" for iteration in (2, 4))


def is_frozen(name: str) -> bool:
    starts = ("transformer.wte", "transformer.wpe", "transformer.h.0.", "transformer.h.1.", "transformer.h.3.ln_1.")
    return name.startswith(starts)


def changed(before: Path, after: Path) -> set[str]:
    """Return the names of the weights that differ between two checkpoints."""
    old, new = (load_file(folder / "model.safetensors") for folder in (before, after))
    return {name for name in old if old[name].tobytes() != new[name].tobytes()}


def names(folder: Path, file: str = "model.safetensors") -> set[str]:
    (path,) = folder.glob(file)
    return set(load_file(path))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of one rank, saved at iterations 2 and 4."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run_ok(folder, [*RUN, FROZEN, "checkpoint.save_interval=2"])
    return folder


def test_frozen_weights_keep_their_bytes(alone: Path, tmp_path: Path) -> None:
    still = ["train.train_iters=1", "schedule.lr_warmup_iters=0", "optimizer.lr=0.0", "schedule.min_lr=0.0"]
    run_ok(tmp_path / "begin", [*RUN, *still])  # the initial values
    every = names(alone / LAST)
    trained = {name for name in every if not is_frozen(name)}
    assert changed(tmp_path / "begin/checkpoints/iter_0000001", alone / LAST) == trained
    assert {name.partition(".")[2] for name in names(alone / LAST, "optimizer/*")} == trained


def test_a_resume_with_other_frozen_names_is_refused(alone: Path, tmp_path: Path) -> None:
    run = [*RUN, f"checkpoint.load={alone / FIRST}"]
    refused = launch(tmp_path / "refused", run)
    assert not refused.ok
    assert "checkpoint.override_freeze=true" in refused.text
    # Other patterns for the same names are no difference.
    same = "train.freeze=['transformer.w[tp]e.*',transformer.h.0.*,transformer.h.1.*,transformer.h.3.ln_1.*]"
    run_ok(tmp_path / "same", [*run, same])
    assert curve(tmp_path / "same") == curve(alone)[2:]
    assert tensor_files(tmp_path / "same" / LAST) == tensor_files(alone / LAST)


@pytest.mark.slow
def test_freezing_may_change_on_a_resume(alone: Path, tmp_path: Path) -> None:
    thawed = ["train.freeze=[transformer.h.2.*]", "checkpoint.override_freeze=true"]
    run_ok(tmp_path / "run", [*RUN, f"checkpoint.load={alone / FIRST}", *thawed])
    every = names(alone / FIRST)
    assert changed(alone / FIRST, tmp_path / "run" / LAST) == {name for name in every if ".h.2." not in name}
    (file,) = (tmp_path / "run" / LAST / "optimizer").iterdir()
    steps = {name: value.item() for name, value in load_file(file).items() if name.startswith("step.")}
    assert steps["step.transformer.wte.weight"] == 2
    assert steps["step.transformer.ln_f.weight"] == 4
    assert not [name for name in steps if "h.2." in name]


@pytest.mark.slow
def test_muon_leaves_frozen_matrices_alone(tmp_path: Path) -> None:
    run_ok(tmp_path / "run", [*RUN, "optimizer=muon", "train.freeze=[transformer.h.*.mlp.*]"])
    kept = names(tmp_path / "run" / LAST, "optimizer/*")
    assert "momentum_buffer.transformer.h.0.attn.c_attn.weight" in kept
    assert not [name for name in kept if ".mlp." in name]
