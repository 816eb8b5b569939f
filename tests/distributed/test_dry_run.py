"""The dry run says what a real launch holds."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.harness import TINY, built, call_on_ranks, compose, launch
from trainer.config.schema import Config
from trainer.launch import process_group as launching
from trainer.memory.dry_run import simulated_memory
from trainer.parallel.invariant import LocalLanes
from trainer.parallel.topology import Topology
from trainer.training.loop import iterate

_ROW = re.compile(r" *(\d+) +(\d+)  (\S.*?)  +([\d,]+)  .* GiB$")
_TP, _PP = "parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"
_MODEL = ("model=gpt2_tiny", *TINY, "model.n_layer=5", "train.global_batch_size=24", "checkpoint.save=null")


def _count(arguments: list[str]) -> None:
    """Build for real, and write how many parameters this rank holds."""
    output, *overrides = arguments
    config = compose(overrides)
    cluster = launching.start("cpu", deterministic=False)
    run = built(config, cluster)
    held = sum(p.numel() for part in run.state.parts for p in _locals(part.model))
    Path(f"{output}.{os.environ['RANK']}").write_text(str(held))
    launching.shutdown(cluster)


def working_bytes_of(config: Config, topology: Topology) -> int:
    return max(memory.working_bytes for *_, memory in simulated_memory(config, topology))


def _locals(model: object) -> list:  # type: ignore[type-arg]
    from reprise.tensors import local_of

    return [local_of(p) for p in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("lanes", "batches"), [(8, 8), (4, 12), (1, 3)])
def test_it_counts_the_sums_of_lanes(tmp_path: Path, lanes: int, batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["train.micro_batch_size=1", f"train.global_batch_size={batches}", f"run.dir={tmp_path}"]
    config = compose([*_MODEL, *sizes, f"parallel.invariant_ranks={lanes}", "train.threads=1"])
    run = built(config, launching.start("cpu", deterministic=False, variables={}))
    accumulate, peak = LocalLanes.after_backward, 0

    def count(reduction: LocalLanes, number: int) -> None:
        nonlocal peak
        accumulate(reduction, number)
        peak = max(peak, sum(tensor.nbytes for tensor in held_by(reduction)))

    monkeypatch.setattr(LocalLanes, "after_backward", count)
    iterate(run)
    off = replace(config, parallel=replace(config.parallel, invariant_ranks=0))
    more = working_bytes_of(config, config.parallel.topology(1)) - working_bytes_of(off, off.parallel.topology(1))
    gradients = 4 * sum(parameter.numel() for parameter in run.state.parameters())
    assert abs(more - (peak - gradients)) <= gradients


def held_by(reduction: LocalLanes) -> Iterator[torch.Tensor]:
    """Yield the gradients that wait between two micro batches; the two ends of a tied table have one each."""
    for sums in reduction._sums:
        yield from sums._sum._partial
        yield from (tensor for tensor in (sums._lane, sums.output and sums.output._sum) if tensor is not None)


@pytest.mark.parametrize(
    ("ranks", "axes"),
    [
        (4, (_TP, "parallel.zero_stage=3", "optimizer.moments_dtype=bfloat16")),
        (4, (_PP,)),
        pytest.param(8, (_TP, _PP), marks=pytest.mark.slow),
        (2, (_TP, "model.lora.rank=3", "model.lora.target_modules=[c_attn,c_proj]", "checkpoint.base=b")),
        pytest.param(4, (_PP, "train.freeze=[transformer.h.0.*,transformer.wte.*]"), marks=pytest.mark.slow),
    ],
)
def test_it_says_what_a_launch_holds(tmp_path: Path, ranks: int, axes: tuple[str, ...]) -> None:
    overrides = [*_MODEL, *axes, "checkpoint.save_interval=0"]
    dry = launch(tmp_path / "dry", [*overrides, "train.dry_run=true", f"train.dry_run_ranks={ranks}"])
    assert dry.ok, dry.text
    rows = {(int(m[1]), int(m[2])): m for line in dry.text.splitlines() if (m := _ROW.match(line))}
    real = call_on_ranks(_count, [str(tmp_path / "real"), *overrides], folder=tmp_path / "run", ranks=ranks)
    assert real.ok, real.text
    tp = 2 if _TP in axes else 1
    pp = 2 if _PP in axes else 1
    assert len(rows) == tp * pp
    most = dict.fromkeys(rows, 0)
    for rank in range(ranks):
        key = (rank // (ranks // pp), rank % tp)
        most[key] = max(most[key], int((tmp_path / f"real.{rank}").read_text()))
    assert most == {key: _number(row[4]) for key, row in rows.items()}


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def test_a_model_of_405_billion_parameters_on_16384_ranks(tmp_path: Path) -> None:
    sizes = [_TP.replace("=2", "=8"), _PP.replace("=2", "=16"), "parallel.sequence_parallel=true"]
    batches = ["train.global_batch_size=2048", "train.micro_batch_size=1", "train.seq_length=8192"]
    dry = ["train.dry_run=true", "train.dry_run_ranks=16384", "parallel.zero_stage=3"]
    ended = launch(tmp_path / "dry", ["model=llama3_405b", *sizes, *batches, *dry], timeout_s=60.0)
    assert ended.ok, ended.text
    assert ended.text.startswith("405,853,388,800 parameters on 16,384 ranks")
    assert "keep a stage's parameters and gradients unsharded" in ended.text
    assert len([line for line in ended.text.splitlines() if _ROW.match(line)]) == 128
