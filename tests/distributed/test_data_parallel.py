"""Data parallelism changes who computes, not what: losses, samples, and the state around an evaluation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.harness import TINY, curve, launch, run_ok, tensor_files

COMMON = ["model=gpt2_tiny", *TINY, "train.train_iters=8", "checkpoint.save_interval=4"]
SPREADS = [(ranks, zero_stage) for ranks in (2, 3) for zero_stage in range(4)]


def losses(folder: Path) -> list[float]:
    return [float.fromhex(row[1]) for row in curve(folder)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Path]:
    """Return runs of eight iterations by ranks and ZeRO stage."""
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for ranks, zero_stage in [(1, 1), *SPREADS]:
        found[ranks, zero_stage] = folder / f"{ranks}-{zero_stage}"
        run_ok(found[ranks, zero_stage], [*COMMON, f"parallel.zero_stage={zero_stage}"], ranks=ranks)
    return found


@pytest.mark.parametrize(("ranks", "zero_stage"), SPREADS)
def test_losses_are_those_of_one_rank(runs: dict[tuple[int, int], Path], ranks: int, zero_stage: int) -> None:
    one, many = curve(runs[1, 1]), curve(runs[ranks, zero_stage])
    # float32 sums in another order: units in the last place of a loss of 5.5, carried on by eight steps.
    assert losses(runs[ranks, zero_stage]) == pytest.approx(losses(runs[1, 1]), abs=1e-5)
    assert [(row[0], row[3], row[4]) for row in many] == [(row[0], row[3], row[4]) for row in one]
    assert [float.fromhex(r[2]) for r in many] == pytest.approx([float.fromhex(r[2]) for r in one], rel=1e-4)


@pytest.mark.parametrize(
    ("before", "after"), [((1, 1), (2, 1)), ((2, 0), (3, 3)), ((3, 3), (1, 1))], ids=["1to2", "2to3", "3to1"]
)
def test_a_rank_change_in_the_middle_reads_each_sample_once(
    runs: dict[tuple[int, int], Path], tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(runs[before], folder)
    overrides = [*COMMON, f"parallel.zero_stage={after[1]}", "checkpoint.reshard=true", "checkpoint.ckpt_step=4"]
    ended = run_ok(folder, overrides, ranks=after[0])
    assert "iteration 4 from" in ended.outputs[0]
    assert f"topology.world_size: saved {before[0]}, now {after[0]}" in ended.outputs[0]

    # The position is the same integer, so any sample left out or read twice would show in the loss at once.
    unbroken, changed = losses(runs[before]), losses(folder)
    assert [row[4] for row in curve(folder)] == [12 * iteration for iteration in range(1, 9)]
    assert changed[:4] == unbroken[:4]
    assert changed[4] == pytest.approx(unbroken[4], rel=1e-6)
    assert changed[5:] == pytest.approx(unbroken[5:], abs=1e-5)


@pytest.mark.parametrize("zero_stage", range(4))
def test_a_save_right_after_an_evaluation_is_the_state(
    runs: dict[tuple[int, int], Path], tmp_path: Path, zero_stage: int
) -> None:
    folder = tmp_path / "evaluated"
    overrides = [*COMMON, f"parallel.zero_stage={zero_stage}", "train.eval_interval=4", "train.eval_iters=1"]
    run_ok(folder, overrides, ranks=2)
    assert curve(folder) == curve(runs[2, zero_stage])
    for iteration in ("iter_0000004", "iter_0000008"):
        plain = tensor_files(runs[2, zero_stage] / "checkpoints" / iteration)
        assert tensor_files(folder / "checkpoints" / iteration) == plain
    state = json.loads((folder / "checkpoints/iter_0000008/trainer_state.json").read_text())
    assert isinstance(state["best_loss"], float)


def test_padding_the_vocabulary_does_not_change_the_loss(runs: dict[tuple[int, int], Path], tmp_path: Path) -> None:
    run_ok(tmp_path / "padded", [*COMMON, "model.pad_vocab_multiple=64"])
    # The sum over the vocabulary has more addends, all zero: vector lanes add in another order.
    assert losses(tmp_path / "padded") == pytest.approx(losses(runs[1, 1]), rel=1e-6)


@pytest.mark.parametrize(("ranks", "zero_stage"), [(1, 1), (2, 3)])
def test_activation_checkpointing_gives_the_same_bits(tmp_path: Path, ranks: int, zero_stage: int) -> None:
    overrides = [*COMMON, "model.dropout=0.1", f"parallel.zero_stage={zero_stage}"]
    run_ok(tmp_path / "kept", overrides, ranks=ranks)
    run_ok(tmp_path / "again", [*overrides, "train.activation_checkpointing=true"], ranks=ranks)
    assert curve(tmp_path / "again") == curve(tmp_path / "kept")
    last = "checkpoints/iter_0000008"
    assert tensor_files(tmp_path / "again" / last) == tensor_files(tmp_path / "kept" / last)


@pytest.mark.slow
def test_compiled_blocks_train_and_resume_bitwise(runs: dict[tuple[int, int], Path], tmp_path: Path) -> None:
    overrides = [*COMMON, "train.compile=true"]
    ended = launch(tmp_path / "compiled", overrides, timeout_s=240.0)
    assert ended.ok, ended.text
    assert "compiling the model: the first iteration may take minutes" in ended.text
    # Other kernels, other rounding.
    assert losses(tmp_path / "compiled") == pytest.approx(losses(runs[1, 1]), abs=1e-4)
    shutil.copytree(tmp_path / "compiled", tmp_path / "resumed")
    resumed = launch(tmp_path / "resumed", [*overrides, "checkpoint.ckpt_step=4"], timeout_s=240.0)
    assert resumed.ok, resumed.text
    assert curve(tmp_path / "resumed") == curve(tmp_path / "compiled")
    last = "checkpoints/iter_0000008"
    assert tensor_files(tmp_path / "resumed" / last) == tensor_files(tmp_path / "compiled" / last)
