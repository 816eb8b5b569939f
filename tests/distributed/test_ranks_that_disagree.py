"""Ranks of a program of one's own that give `save` different things: refused on every rank, nothing committed."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from reprise import load, save
from reprise.errors import CheckpointError, ReplicaError
from tests.harness import Ended, call_on_ranks

STATISTICS = ["*.running_*", "*.num_batches_tracked"]


@contextmanager
def process_group() -> Iterator[int]:
    """Join the process group that the environment names; give this rank."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world_size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    yield rank
    dist.barrier()
    dist.destroy_process_group()


def refused(call: Callable[[], object]) -> None:
    """Print what the call is refused with, on one line."""
    with pytest.raises(CheckpointError) as caught:
        call()
    print(f"[{type(caught.value).__name__}] {caught.value}", flush=True)


class Stage(nn.Module):
    """One stage of a pipeline, which names its layers by their number in the whole model."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(3, 3) for number in (first, first + 1)})


class Plain(nn.Module):
    """A parameter that several ranks hold."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((40_000,), value))


def save_stages(arguments: list[str]) -> None:
    with process_group() as rank:
        refused(lambda: save(arguments[0], Stage(2 * rank), iteration=1))


def save_other_shapes(arguments: list[str]) -> None:
    with process_group() as rank:
        model = nn.Linear(3, 4 + rank).to(torch.float64 if rank == 2 else torch.float32)
        refused(lambda: save(arguments[0], model, iteration=1))


def save_other_values(arguments: list[str]) -> None:
    with process_group() as rank:
        refused(lambda: save(arguments[0], Plain(float(rank == 1)), iteration=1))
        save(arguments[0], Plain(1.0), iteration=2)


def save_other_iterations(arguments: list[str]) -> None:
    with process_group() as rank:
        refused(lambda: save(arguments[0], Plain(1.0), iteration=1 + rank))


def save_nans(arguments: list[str]) -> None:
    """Save NaNs of the same bits on all ranks, then of other bits on one."""
    with process_group() as rank:
        model = Plain(float("nan"))
        save(arguments[0], model, iteration=1)
        if rank:
            (quiet,) = struct.unpack("<i", struct.pack("<I", 0x7FC00001))
            model.w.data.view(torch.int32)[7] = quiet
        refused(lambda: save(arguments[0], model, iteration=2))


def save_what_one_rank_cannot(arguments: list[str]) -> None:
    """Save with one argument on rank 1 that is refused there."""
    with process_group() as rank:
        model = Plain(1.0)
        if rank:
            model.register_buffer("packed", torch.empty(3, dtype=torch.uint4))
        refused(lambda: save(arguments[0], model, iteration=1))
        for odd in ({"iteration": -1}, {"from_rank0": ["nothing"]}, {"state": {"loss": len}}):
            given: dict[str, Any] = {"iteration": 1, **(odd if rank else {})}
            refused(lambda given=given: save(arguments[0], Plain(1.0), **given))  # type: ignore[misc]
        save(arguments[0], Plain(1.0), iteration=2)


def save_other_documents(arguments: list[str]) -> None:
    """Save with another state on rank 1, another learning rate, other patterns, and then the same of all."""
    with process_group() as rank:
        model = Plain(1.0)
        optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.2)]
        refused(lambda: save(arguments[0], model, iteration=1, state={"seed": rank}))
        refused(lambda: save(arguments[0], model, optimizers[rank], iteration=1))
        refused(lambda: save(arguments[0], model, iteration=1, from_rank0=["w"] * rank))
        state = {"a": 1, "b": 2} if rank else {"b": 2, "a": 1}
        save(arguments[0], model, optimizers[0], iteration=2, state=state)


def train_ddp(arguments: list[str]) -> None:
    """Train a model under DDP on other data on each rank, so that BatchNorm's statistics differ."""
    with process_group() as rank:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(2):
            data = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            wrapped(data).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        own = model[1].running_mean.clone()  # type: ignore[operator]
        refused(lambda: save(arguments[0], model, optimizer, iteration=2))
        save(arguments[0], model, optimizer, iteration=2, from_rank0=STATISTICS)
        load(arguments[0], model, optimizer)
        saved = load_file(Path(arguments[0], "iter_0000002/model.safetensors"))["1.running_mean"]
        assert torch.equal(model[1].running_mean, saved)  # type: ignore[arg-type]
        assert torch.equal(own, saved) == (rank == 0)


def run(function: Callable[[list[str]], None], folder: Path, *, ranks: int = 2) -> Ended:
    ended = call_on_ranks(function, [str(folder / "saved")], folder=folder / "ranks", ranks=ranks)
    assert ended.ok, ended.text
    return ended


def committed(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "saved").glob("*") if path.is_dir())


def test_pipeline_stages_are_refused_with_names_of_one_rank(tmp_path: Path) -> None:
    ended = run(save_stages, tmp_path)
    for output in ended.outputs:
        assert "The ranks give different models or optimizers" in output
        lacking = "; ".join(
            f"layers.{n}.{part} is on rank 0 and not on rank 1" for n in (0, 1) for part in ("weight", "bias")
        )
        assert f"{lacking}; layers.2.weight is on rank 1 and not on rank 0" in output
    assert committed(tmp_path) == []


def test_other_shapes_and_dtypes_are_refused_by_tensor_and_rank(tmp_path: Path) -> None:
    ended = run(save_other_shapes, tmp_path, ranks=3)
    for output in ended.outputs:
        for name, dtype, rank, shapes in (("weight", "F32", 1, "[4, 3] [5, 3]"), ("bias", "F64", 2, "[4] [6]")):
            first, other = re.findall(r"\[[^]]*\]", shapes)
            assert f"{name} is F32 {first} (model) on rank 0 and {dtype} {other} (model) on rank {rank}" in output
    assert committed(tmp_path) == []


def test_replicas_that_differ_are_refused_by_tensor_and_ranks(tmp_path: Path) -> None:
    ended = run(save_other_values, tmp_path, ranks=3)
    for output in ended.outputs:
        assert "hold different bits" in output
        assert "w; ranks 0, 2 against rank 1" in output
    assert f"[{ReplicaError.__name__}]" in ended.outputs[0]
    assert committed(tmp_path) == ["iter_0000002"]


def test_other_iterations_are_refused_on_every_rank(tmp_path: Path) -> None:
    ended = run(save_other_iterations, tmp_path)
    for output in ended.outputs:
        assert "save(iteration=1) on rank 0; save(iteration=2) on rank 1" in output
    assert [name for name in committed(tmp_path) if name.startswith("iter_")] == []


def test_nans_are_compared_as_bits(tmp_path: Path) -> None:
    ended = run(save_nans, tmp_path)
    assert all("hold different bits" in output for output in ended.outputs)
    assert committed(tmp_path) == ["iter_0000001"]


def test_what_save_refuses_on_one_rank_it_refuses_on_all_at_once(tmp_path: Path) -> None:
    ended = run(save_what_one_rank_cannot, tmp_path)
    for output in ended.outputs:
        assert "uint4" in output
        assert "found -1" in output or "save(iteration=-1) on rank 1" in output  # whichever rank comes first
        assert "The ranks give different from_rank0, expected the same on every rank, found [] on rank 0" in output
        assert "neither a tensor nor of a type that a checkpoint holds (/loss)" in output
    assert committed(tmp_path) == ["iter_0000002"]


def test_arguments_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    ended = run(save_other_documents, tmp_path)
    for output in ended.outputs:
        assert "The ranks give different values (/seed)" in output
        assert "The ranks give different values (/optimizer/param_groups, w)" in output
        assert "The ranks give different from_rank0" in output
        assert output.count(" on rank 0 and ") == 3
    assert committed(tmp_path) == ["iter_0000002"]


def test_batchnorm_statistics_are_refused_or_taken_from_rank_0(tmp_path: Path) -> None:
    ended = run(train_ddp, tmp_path)
    assert all("1.running_mean; 1.running_var" in output for output in ended.outputs)
    assert committed(tmp_path) == ["iter_0000002"]
