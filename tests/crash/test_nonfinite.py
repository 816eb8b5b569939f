"""A gradient that is no finite number: all ranks stop and name it, or leave that iteration's step out."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.crash import troubles
from tests.crash.outcomes import assert_ends_as, saved
from tests.harness import TINY, Ended, checkpoint, curve, last_iteration, launch, run_ok, tensor_files
from tests.profiles import nightly, slow

BASE = ("model=gpt2_tiny", *TINY, "train.train_iters=6", "model.dropout=0.1")
SKIP = "train.on_nonfinite=skip"
# layout: ranks, overrides, the rank that holds a bad gradient, of which parameters; the last comes first in the model
LAYOUTS: dict[str, tuple[int, tuple[str, ...], int, tuple[str, ...]]] = {
    "one rank": (1, (), 0, ("transformer.h.1.mlp.c_fc.bias", "transformer.h.0.attn.c_attn.weight")),
    "zero3": (2, ("parallel.zero_stage=3",), 1, ("transformer.h.1.mlp.c_proj.weight",)),
    "pp2": (2, ("parallel=pp2",), 1, ("transformer.ln_f.bias", "transformer.h.1.ln_1.weight")),
    "tp2": (2, ("parallel=tp2",), 1, ("transformer.h.0.mlp.c_fc.weight",)),
}
on_all_layouts = pytest.mark.parametrize("layout", ["one rank", slow("tp2"), nightly("zero3"), nightly("pp2")])


def poisoned(run: Path, layout: str, *overrides: str, iteration: int) -> Ended:
    ranks, topology, rank, names = LAYOUTS[layout]
    trouble = {"name": "infinite gradient", "rank": rank, "iteration": iteration, "names": names}
    return troubles.train(run, [*BASE, *topology, *overrides], trouble, ranks=ranks)


@on_all_layouts
def test_a_run_stops_names_the_parameter_and_saves_nothing_of_it(tmp_path: Path, layout: str) -> None:
    ranks, topology, _, names = LAYOUTS[layout]
    whole, run, every = tmp_path / "whole", tmp_path / "run", "checkpoint.save_interval=2"
    run_ok(whole, [*BASE, *topology, every], ranks=ranks)
    ended = poisoned(run, layout, every, iteration=5)
    assert ended.statuses == (1,) * ranks, ended.text
    assert all(f"iteration 5, gradient of {names[-1]}" in output for output in ended.outputs), ended.text
    assert "gradient norm inf" in ended.outputs[0]
    assert last_iteration(run / "metrics.jsonl") == 4
    assert saved(run) == [2, 4]
    for number in saved(run):
        assert tensor_files(checkpoint(run, number)) == tensor_files(checkpoint(whole, number))
    run_ok(run, [*BASE, *topology, every], ranks=ranks)
    assert_ends_as(run, whole)


def test_a_norm_that_overflows_is_told_from_a_bad_gradient(tmp_path: Path) -> None:
    names = LAYOUTS["one rank"][3]
    trouble = {"name": "infinite gradient", "rank": 0, "iteration": 2, "names": names, "value": 3e38}
    ended = troubles.train(tmp_path, [*BASE, "checkpoint.save_interval=1"], trouble)
    assert ended.statuses == (1,), ended.text
    assert "iteration 2, all gradients are finite" in ended.text
    assert saved(tmp_path) == [1]


@pytest.mark.slow
@on_all_layouts
def test_a_skipped_iteration_changes_no_bit_and_resumes_bitwise(tmp_path: Path, layout: str) -> None:
    ranks, topology, _, names = LAYOUTS[layout]
    whole, run = tmp_path / "whole", tmp_path / "run"
    ended = poisoned(whole, layout, SKIP, "checkpoint.save_interval=1", iteration=3)
    assert ended.ok, ended.text
    assert f"iteration 3, gradient of {names[-1]}" in ended.outputs[0]
    files = [tensor_files(checkpoint(whole, number)) for number in (2, 3, 4)]
    assert [one == other for one, other in itertools.pairwise(files)] == [True, False]
    assert (whole / "metrics.jsonl").read_text().count('"skipped"') == 1
    assert [row[4] for row in curve(whole)] == [12 * number for number in range(1, 7)]
    assert poisoned(run, layout, SKIP, "train.exit_interval=3", iteration=3).ok
    assert saved(run) == [3]
    run_ok(run, [*BASE, *topology, SKIP], ranks=ranks)
    assert_ends_as(run, whole)


def test_a_loss_that_overflows_stops_the_run(tmp_path: Path) -> None:
    ended = launch(tmp_path, [*BASE, "optimizer.lr=1e38", "checkpoint.save_interval=1"])
    assert ended.statuses == (1,), ended.text
    assert "iteration 2, gradient of transformer.wte.weight), found loss nan" in ended.text
    assert saved(tmp_path) == [1]
