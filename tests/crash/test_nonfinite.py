"""A gradient that is no finite number: all ranks stop and name it, or leave that iteration's step out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer.__main__
import trainer.training.step
from reprise.live_tensors import local_of, parameter_names
from tests.harness import TINY, Ended, call_on_ranks, curve, last_iteration, launch, run_ok, tensor_files
from trainer.run.state import TrainerState

ITERATIONS = 6
BASE = ("model=gpt2_tiny", *TINY, f"train.train_iters={ITERATIONS}", "model.dropout=0.1")
SKIP = "train.on_nonfinite=skip"
# layout: ranks, overrides, the rank that holds a bad gradient, of which parameters; the first in order of the model
LAYOUTS: dict[str, tuple[int, tuple[str, ...], int, tuple[str, ...]]] = {
    "one rank": (1, (), 0, ("transformer.h.1.mlp.c_fc.bias", "transformer.h.0.attn.c_attn.weight")),
    "zero3": (2, ("parallel.zero_stage=3",), 1, ("transformer.h.1.mlp.c_proj.weight",)),
    "pp2": (
        2,
        ("parallel.pipeline_model_parallel_size=2",),
        1,
        ("transformer.ln_f.bias", "transformer.h.1.ln_1.weight"),
    ),
    "tp2": (2, ("parallel.tensor_model_parallel_size=2",), 1, ("transformer.h.0.mlp.c_fc.weight",)),
}
FIRST = {
    "one rank": "transformer.h.0.attn.c_attn.weight",
    "zero3": "transformer.h.1.mlp.c_proj.weight",
    "pp2": "transformer.h.1.ln_1.weight",
    "tp2": "transformer.h.0.mlp.c_fc.weight",
}


def train_poisoned(arguments: list[str]) -> None:
    """Run the trainer's command; on one rank an element of some gradients is infinite in one iteration."""
    told = json.loads(arguments[0])
    is_here = int(os.environ.get("RANK", "0")) == told["rank"]
    compute = trainer.training.step.forward_backward

    def poison(state: TrainerState, *rest: Any) -> list[torch.Tensor]:
        loss = compute(state, *rest)
        if is_here and state.progress.iteration + 1 == told["iteration"]:
            named = {name: parameter for part in state.parts for parameter, name in parameter_names(part.model).items()}
            for name in told["names"]:
                local_of(named[name].grad).view(-1)[0] = torch.inf  # type: ignore[arg-type]
        return loss

    trainer.training.step.forward_backward = poison
    sys.argv = ["trainer", *arguments[1:]]
    trainer.__main__.main()


def poisoned(run: Path, layout: str, overrides: Sequence[str], *, iteration: int) -> Ended:
    ranks, topology, rank, names = LAYOUTS[layout]
    told = json.dumps({"iteration": iteration, "rank": rank, "names": names})
    arguments = [told, f"run.dir={run}", *BASE, *topology, *overrides]
    return call_on_ranks(train_poisoned, arguments, folder=run, ranks=ranks)


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir())


def slow_but_for_one_rank() -> list[Any]:
    marks = {"one rank": [], "tp2": [pytest.mark.slow]}
    return [pytest.param(name, marks=marks.get(name, [pytest.mark.slow, pytest.mark.nightly])) for name in LAYOUTS]


@pytest.mark.parametrize("layout", slow_but_for_one_rank())
def test_a_run_stops_names_the_parameter_and_saves_nothing_of_it(tmp_path: Path, layout: str) -> None:
    ranks, topology, *_ = LAYOUTS[layout]
    whole, run, every = tmp_path / "whole", tmp_path / "run", "checkpoint.save_interval=2"
    run_ok(whole, [*BASE, *topology, every], ranks=ranks)
    ended = poisoned(run, layout, [every], iteration=5)
    assert ended.statuses == (1,) * ranks, ended.text
    for output in ended.outputs:
        assert f"iteration 5, gradient of {FIRST[layout]}" in output, ended.text
    assert "gradient norm inf" in ended.outputs[0]
    assert last_iteration(run / "metrics.jsonl") == 4
    assert saved(run) == ["iter_0000002", "iter_0000004"]
    for name in saved(run):
        assert tensor_files(run / "checkpoints" / name) == tensor_files(whole / "checkpoints" / name)
    run_ok(run, [*BASE, *topology, every], ranks=ranks)
    assert curve(run) == curve(whole)
    last = f"checkpoints/iter_{ITERATIONS:07d}"
    assert tensor_files(run / last) == tensor_files(whole / last)


@pytest.mark.parametrize("layout", slow_but_for_one_rank())
def test_a_skipped_iteration_changes_no_bit_and_resumes_bitwise(tmp_path: Path, layout: str) -> None:
    ranks, topology, *_ = LAYOUTS[layout]
    whole, run, every = tmp_path / "whole", tmp_path / "run", "checkpoint.save_interval=1"
    ended = poisoned(whole, layout, [SKIP, every], iteration=3)
    assert ended.ok, ended.text
    assert f"iteration 3, gradient of {FIRST[layout]}" in ended.outputs[0]
    files = {number: tensor_files(whole / f"checkpoints/iter_{number:07d}") for number in (2, 3, 4)}
    assert files[3] == files[2]
    assert files[4] != files[3]
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if row.get("skipped")] == [3]
    assert [row[4] for row in curve(whole)] == [12 * number for number in range(1, ITERATIONS + 1)]
    assert poisoned(run, layout, [SKIP, "train.exit_interval=3"], iteration=3).ok
    assert saved(run) == ["iter_0000003"]
    run_ok(run, [*BASE, *topology, SKIP], ranks=ranks)
    assert curve(run) == curve(whole)
    last = f"checkpoints/iter_{ITERATIONS:07d}"
    assert tensor_files(run / last) == tensor_files(whole / last)


def test_a_loss_that_overflows_stops_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = launch(run, [*BASE, "optimizer.lr=1e38", "checkpoint.save_interval=1"])
    assert ended.statuses == (1,), ended.text
    assert "iteration 2, gradient of transformer.wte.weight), found loss nan" in ended.text
    assert saved(run) == ["iter_0000001"]
