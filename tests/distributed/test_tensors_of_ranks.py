"""Tensors with memory elsewhere: pending collectives, several shards on a rank, complex, none yet; described parts."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from reprise import load, load_state_dict, save, save_state_dict
from tests.distributed.programs import refused, run_programs
from tests.states import Holding

WHOLE = torch.arange(24.0).reshape(4, 6)


def pending(mesh: DeviceMesh, fill: torch.Tensor) -> DTensor:
    """Return a DTensor whose local tensor is the result of a collective that nobody has waited for."""
    found = distribute_tensor(fill, mesh, [Shard(0)]).redistribute(placements=[Replicate()], async_op=True)
    assert isinstance(found._local_tensor, AsyncCollectiveTensor)
    return found


def columns(mesh: DeviceMesh, fill: torch.Tensor, rank: int, *, cut: int = 2) -> DTensor:
    """Return a DTensor whose columns, from `cut` on, rank 1 holds as two shards; rank 0 holds the others."""
    parts = [(cut, 5), (5, 6)] if rank else [(0, cut)]
    shards = [fill[:, lo:hi].clone() for lo, hi in parts if lo < hi]
    wrapper = LocalShardsWrapper(shards, [(0, lo) for lo, hi in parts if lo < hi])
    return DTensor.from_local(wrapper, mesh, [Shard(1)], run_check=False, shape=fill.shape, stride=fill.stride())


def described(rank: int, *, cut: int, fill: float | None = None) -> nn.Parameter:
    """Return a rank's rows as torch's CheckpointableTensor: rank 0 has those before `cut`."""
    rows = slice(cut, 4) if rank else slice(0, cut)
    local = nn.Parameter(WHOLE[rows].clone() if fill is None else torch.full_like(WHOLE[rows], fill))
    place = {"global_shape": (4, 6), "global_offsets": [(rows.start, 0)], "local_offsets": [(0, 0)]}
    for name, value in (place | {"local_sizes": [tuple(local.shape)]}).items():
        setattr(local, name, value)
    return local


def carry_tensors(folder: Path, rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.complex(WHOLE, -WHOLE)
    state = {
        "pending": pending(mesh, WHOLE),
        "columns": columns(mesh, WHOLE, rank),
        "described": described(rank, cut=3),
        "object": Holding(columns(mesh, WHOLE, rank)),
        "table": columns(mesh, WHOLE, rank, cut=0),
        "complex": distribute_tensor(whole, mesh, [Shard(1)]),
    }
    path = save_state_dict(folder, state, iteration=1)
    again = {
        "pending": pending(mesh, torch.zeros(4, 6)),
        "columns": columns(mesh, torch.zeros(4, 6), rank, cut=3),
        "described": described(rank, cut=1, fill=0.0),
        "object": Holding(columns(mesh, torch.zeros(4, 6), rank)),
        "table": torch.zeros(4, 6),
        "complex": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)]).conj(),
    }
    load_state_dict(path, again)
    assert torch.equal(again["pending"].to_local(), WHOLE)
    assert torch.equal(again["table"], WHOLE)
    assert torch.equal(again["described"], described(rank, cut=1))
    assert torch.equal(again["complex"].full_tensor(), whole)
    for held in (again["columns"]._local_tensor, again["object"].tensor._local_tensor):
        for shard, (_, column) in zip(held.local_shards(), held.local_offsets(), strict=True):
            assert torch.equal(shard, WHOLE[:, column : column + shard.shape[1]])
    shards = [torch.zeros(2, 2), torch.zeros(2, 2)]
    gap = LocalShardsWrapper(shards, [(0, 0), (2, 2)])
    refused(lambda: save_state_dict(folder, {"gap": DTensor.from_local(gap, mesh, [Shard(0)])}, iteration=2))


def carry_moments(folder: Path, rank: int) -> None:
    saved, loaded, fresh = (nn.ParameterDict({"x": described(rank, cut=cut)}) for cut in (3, 1, 1))
    optimizers = [torch.optim.SGD(model.parameters(), momentum=0.9) for model in (saved, loaded, fresh)]
    for model, optimizer in zip((saved, loaded), optimizers, strict=False):
        (model["x"] * model["x"].detach()).sum().backward()
        optimizer.step()
    path = save(folder / "moments", saved, optimizers[0], iteration=1)
    for model, optimizer in zip((loaded, fresh), optimizers[1:], strict=True):
        load(path, model, optimizer)
        moment = optimizer.state[model["x"]]["momentum_buffer"]
        assert torch.equal(moment, described(rank, cut=1))


def test_moments_lie_where_their_parameter_does(tmp_path: Path) -> None:
    run_programs([carry_moments], tmp_path)


def test_tensors_whose_memory_is_elsewhere_are_carried(tmp_path: Path) -> None:
    assert "(/gap)" in run_programs([carry_tensors], tmp_path)["carry_tensors"].text
