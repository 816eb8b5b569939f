"""Tensors with memory elsewhere: pending collectives, complex numbers, described parts."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from reprise import load, load_state_dict, save, save_state_dict
from tests.distributed.programs import run_programs

WHOLE = torch.arange(24.0).reshape(4, 6)


def pending(mesh: DeviceMesh, fill: torch.Tensor) -> DTensor:
    """Return a DTensor whose local tensor is the result of a collective that nobody has waited for."""
    found = distribute_tensor(fill, mesh, [Shard(0)]).redistribute(placements=[Replicate()], async_op=True)
    assert isinstance(found._local_tensor, AsyncCollectiveTensor)
    return found


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
        "described": described(rank, cut=3),
        "complex": distribute_tensor(whole, mesh, [Shard(1)]),
    }
    path = save_state_dict(folder, state, iteration=1)
    again = {
        "pending": pending(mesh, torch.zeros(4, 6)),
        "described": described(rank, cut=1, fill=0.0),
        "complex": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)]).conj(),
    }
    load_state_dict(path, again)
    assert torch.equal(again["pending"].to_local(), WHOLE)
    assert torch.equal(again["described"], described(rank, cut=1))
    assert torch.equal(again["complex"].full_tensor(), whole)


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
    run_programs([carry_tensors], tmp_path)
