"""Ranks of a program of one's own that give `save` different things: refused on every rank, nothing committed."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from reprise import load, save
from tests.distributed.programs import Outcome, refused, run_programs
from tests.distributed.programs import process_group as process_group

STATISTICS = ["*.running_*", "*.num_batches_tracked"]


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


def save_stages(folder: Path, rank: int) -> None:
    refused(lambda: save(folder, Stage(2 * rank), iteration=1))


def save_other_shapes(folder: Path, rank: int) -> None:
    model = nn.Linear(3, 4 + rank).to(torch.float64 if rank == 2 else torch.float32)
    refused(lambda: save(folder, model, iteration=1))


def save_other_values(folder: Path, rank: int) -> None:
    refused(lambda: save(folder, Plain(float(rank == 1)), iteration=1))
    save(folder, Plain(1.0), iteration=2)


def save_other_iterations(folder: Path, rank: int) -> None:
    refused(lambda: save(folder, Plain(1.0), iteration=1 + rank))


def save_nans(folder: Path, rank: int) -> None:
    """Save NaNs of the same bits on all ranks, then of other bits on one."""
    model = Plain(float("nan"))
    save(folder, model, iteration=1)
    if rank:
        (quiet,) = struct.unpack("<i", struct.pack("<I", 0x7FC00001))
        model.w.data.view(torch.int32)[7] = quiet
    refused(lambda: save(folder, model, iteration=2))


def save_what_one_rank_cannot(folder: Path, rank: int) -> None:
    """Save with one argument on rank 1 that is refused there."""
    model = Plain(1.0)
    if rank:
        model.register_buffer("packed", torch.empty(3, dtype=torch.uint4))
    refused(lambda: save(folder, model, iteration=1))
    for odd in ({"iteration": -1}, {"state": {"loss": len}}):
        given: dict[str, Any] = {"iteration": 1, **(odd if rank else {})}
        refused(lambda given=given: save(folder, Plain(1.0), **given))  # type: ignore[misc]
    save(folder, Plain(1.0), iteration=2)


def save_other_documents(folder: Path, rank: int) -> None:
    """Save with another state on rank 1, another learning rate, and then the same of all but for the patterns."""
    model = Plain(1.0)
    optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.2)]
    refused(lambda: save(folder, model, iteration=1, state={"seed": rank}))
    refused(lambda: save(folder, model, optimizers[rank], iteration=1))
    state = {"a": 1, "b": 2} if rank else {"b": 2, "a": 1}
    save(folder, model, optimizers[0], iteration=2, state=state, from_rank0=["w"] * rank)


def train_ddp(folder: Path, rank: int) -> None:
    """Train a model under DDP on other data on each rank, so that BatchNorm's statistics differ."""
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
    refused(lambda: save(folder, model, optimizer, iteration=2))
    save(folder, model, optimizer, iteration=2, from_rank0=STATISTICS)
    load(folder, model, optimizer)
    saved = load_file(folder / "iter_0000002/model.safetensors")["1.running_mean"]
    assert torch.equal(model[1].running_mean, saved)  # type: ignore[arg-type]
    assert torch.equal(own, saved) == (rank == 0)


ON_TWO = (save_stages, save_other_iterations, save_nans, save_what_one_rank_cannot, save_other_documents, train_ddp)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Return what became of each program."""
    folder = tmp_path_factory.mktemp("disagree")
    three = run_programs([save_other_shapes, save_other_values], folder / "three", ranks=3)
    return {**run_programs(ON_TWO, folder / "two"), **three}


# Of each program, what every rank is told, and the checkpoints that there are in the end.
CASES: dict[str, tuple[list[str], list[str]]] = {
    "save_stages": (
        [
            *(f"layers.{n}.{part} is on rank 0 and not on rank 1" for n in (0, 1) for part in ("weight", "bias")),
            "layers.2.weight is on rank 1 and not on rank 0",
        ],
        [],
    ),
    "save_other_shapes": (
        [
            "weight is F32 [4, 3] (model) on rank 0 and F32 [5, 3] (model) on rank 1",
            "bias is F32 [4] (model) on rank 0 and F64 [6] (model) on rank 2",
        ],
        [],
    ),
    "save_other_values": (["w; ranks 0, 2 against rank 1"], ["iter_0000002"]),
    "save_other_iterations": (["save(iteration=1) on rank 0; save(iteration=2) on rank 1"], []),
    "save_nans": (["w; rank 0 against rank 1"], ["iter_0000001"]),
    "save_what_one_rank_cannot": (["uint4", "(/loss)"], ["iter_0000002"]),
    "save_other_documents": (["/seed is ", "/optimizer/param_groups, w is "], ["iter_0000002"]),
    "train_ddp": (["1.running_mean; 1.running_var"], ["iter_0000002"]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_differs_is_named_on_every_rank(outcomes: dict[str, Outcome], name: str) -> None:
    texts, committed = CASES[name]
    for output in outcomes[name].outputs:
        assert all(text in output for text in texts), output
    assert outcomes[name].committed == committed


def test_an_iteration_below_zero_is_refused_on_every_rank(outcomes: dict[str, Outcome]) -> None:
    for output in outcomes["save_what_one_rank_cannot"].outputs:
        assert re.search(r"found -1|save\(iteration=-1\) on rank 1", output)
    assert "[ReplicaError]" in outcomes["save_other_values"].outputs[0]
