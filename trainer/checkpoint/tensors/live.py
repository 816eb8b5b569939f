"""The live tensors of a model and its optimizer, with the names and boxes they have on disk.

The only module that reads the internals of torch's DTensor. What is done with the tensors is told elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trainer.checkpoint.format.box import Box, Split, box_of_splits, intersect, relative, whole
from trainer.checkpoint.format.json_file import Document
from trainer.checkpoint.format.layout import TensorKind, TensorSpec
from trainer.checkpoint.tensors.storable import check_byteorder, check_disjoint, check_memory
from trainer.errors import CheckpointError

Marks = tuple[tuple[int, int, torch.Size, tuple[int, ...], torch.dtype], ...]

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, slots=True)
class Stored:
    """How a parameter lies on disk where that differs from how it lives.

    Args:
        shape: shape on disk.
        view: a shape of the same C-ordered bytes with the live parameter's dimensions; the live parameter may be
            larger (padding), and what is beyond `view` is not stored.
    """

    shape: tuple[int, ...]
    view: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A rank's part of one logical tensor.

    Args:
        box: where it lies, in coordinates of `spec.view`.
        local: the live memory, of shape `box.shape`; writing to it changes the model.
        replicas: all global ranks that hold this same box, in rising order.
        is_copy: a second live copy of a tensor that other ranks save: it is filled by a load and never written.
    """

    spec: TensorSpec
    box: Box
    local: torch.Tensor
    replicas: tuple[int, ...]
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class Contents:
    """All that a checkpoint holds, seen from one rank.

    Args:
        specs: every tensor of the checkpoint in model order, equal on all ranks.
        live: the parts that this rank holds.
        aliases: second names of stored tensors (tied parameters), alias -> stored name. What is saved is the stored
            name's tensor, and no other is looked at: `aliases_of` gives only names of the very same tensor, so that
            there is nothing to compare. Whoever names another tensor here answers for its being equal.
        documents: files beside the tensors, by file name: JSON, or bytes that are written as they are. Only rank 0's
            are written.
        optimizers: those that change the live tensors; a background save holds their next step back for as long as it
            reads what that changes. What none of them changes is copied.
    """

    specs: tuple[TensorSpec, ...]
    live: tuple[LiveTensor, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    documents: Mapping[str, Document] = field(default_factory=dict)
    optimizers: tuple[torch.optim.Optimizer, ...] = ()


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks that hold one model, or one stage of it, as an array over named axes.

    A tensor without a placement on an axis is replicated along it: a plain tensor on all of them.
    """

    ranks: npt.NDArray[np.int64]
    axes: tuple[str, ...]

    @staticmethod
    def flat(world_size: int) -> Grid:
        """Return the grid of all ranks on one axis without a name that any mesh would have."""
        return Grid(np.arange(world_size), ("",))

    def holders(self, fixed: Mapping[str, int]) -> tuple[int, ...]:
        """Return the ranks at the `fixed` coordinates, in rising order."""
        index = tuple(fixed.get(axis, slice(None)) for axis in self.axes)
        return tuple(sorted(int(rank) for rank in np.ravel(self.ranks[index])))


def free_gathered_parameters(model: nn.Module) -> None:
    """Free every gathered FSDP2 parameter, so that `named_parameters()` are the optimizer's again.

    After a forward without gradients FSDP2 may hold whole plain tensors: saving them would see wrong boxes, loading
    into them would leave the shards stale.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def live_tensors(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    grid: Grid,
    stored: Mapping[str, Stored] | None = None,
) -> Iterator[LiveTensor]:
    """Yield every tensor of the state: parameters, persistent buffers, then optimizer state by parameter name.

    Args:
        grid: the ranks that hold this model.
        stored: how parameters lie on disk, by name, where that differs from how they live.

    Raises:
        CheckpointError: for an optimizer that holds other parameters than the model, a tensor that is no box, is
            sparse or quantised, or shares memory with another, or a big-endian host.
    """
    check_byteorder(sys.byteorder)
    free_gathered_parameters(model)
    stored = stored or {}
    names = parameter_names(model)
    buffers = list(_persistent_buffers(model))
    _check_memory([*((name, parameter) for parameter, name in names.items()), *buffers])
    for parameter, name in names.items():
        yield from _locate(TensorKind.MODEL, name, parameter.detach(), grid=grid, stored=stored.get(name))
    for name, buffer in buffers:
        yield from _locate(TensorKind.MODEL, name, buffer, grid=grid, stored=None)
    if optimizer is not None:
        _refuse_strangers(optimizer, names)
        yield from _optimizer_tensors(optimizer, names, grid=grid, stored=stored)


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return every parameter with its canonical name, in model order; a tied one has the name registered first."""
    return {parameter: canonical_name(name) for name, parameter in model.named_parameters()}


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Return the second names of tied parameters: alias -> the name that is stored."""
    names = parameter_names(model)
    return {
        canonical_name(name): names[parameter]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if canonical_name(name) != names[parameter]
    }


def canonical_name(name: str) -> str:
    """Return a parameter's name without the prefixes of torch's wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory this rank holds of a tensor that may be a DTensor, without a gradient."""
    plain = tensor.detach()
    return plain.to_local() if is_dtensor(plain) else plain  # type: ignore[attr-defined]


def memory_holder(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor whose `data` is the memory of a tensor that may be a DTensor."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def with_memory(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is placed as `tensor` is, plain or a DTensor, whose local memory is `local`."""
    if not is_dtensor(tensor):
        return local
    from torch.distributed.tensor import DTensor

    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def memory_marks(model: nn.Module, optimizer: torch.optim.Optimizer) -> Marks:
    """Return what changes where a tensor of the state is another one, or lies elsewhere, than when it was asked last.

    Frees gathered FSDP2 parameters first, as enumerating the state does.
    """
    free_gathered_parameters(model)
    state = (value for values in optimizer.state.values() for value in values.values())
    return tuple(
        (id(tensor), memory_holder(tensor).data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        for tensor in (*model.parameters(), *model.buffers(), *state)
        if isinstance(tensor, torch.Tensor)
    )


def storages_of(optimizers: Iterable[torch.optim.Optimizer]) -> frozenset[int]:
    """Return the addresses of all storages that only a step of these optimizers changes: parameters and their state."""
    tensors = [
        tensor
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        for tensor in (parameter, *optimizer.state.get(parameter, {}).values())
        if isinstance(tensor, torch.Tensor)
    ]
    return frozenset(local_of(tensor).untyped_storage().data_ptr() for tensor in tensors)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing what is not imported yet."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield canonical_name(f"{prefix}.{name}" if prefix else name), buffer


def _check_memory(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    parts = [(name, local_of(tensor)) for name, tensor in named]
    for name, local in parts:
        check_memory(name, local)
    check_disjoint(parts)


def _refuse_strangers(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> None:
    strangers = sum(p not in names for group in optimizer.param_groups for p in group["params"])
    if strangers:
        raise CheckpointError(
            "The optimizer holds parameters that are not the model's",
            found=f"{strangers} of them",
            fix="Build the optimizer after the model is wrapped (fully_shard, parallelize_module, to).",
        )


def _optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    *,
    grid: Grid,
    stored: Mapping[str, Stored],
) -> Iterator[LiveTensor]:
    """Yield all of one moment in model order, then all of the next; scalars last."""
    keys = {
        key: value.ndim for p in names for key, value in optimizer.state.get(p, {}).items() if _is_tensor(key, value)
    }
    for key in sorted(keys, key=lambda k: (keys[k] == 0, k)):
        for parameter, name in names.items():
            value = optimizer.state.get(parameter, {}).get(key)
            if value is None:
                continue
            check_memory(f"{key}.{name}", local_of(value))
            same = value.shape == parameter.shape
            owner = parameter if is_dtensor(parameter) else None
            yield from _locate(
                TensorKind.OPTIMIZER,
                f"{key}.{name}",
                value,
                grid=_grid_of(owner, grid),
                stored=stored.get(name) if same else None,
            )


def _is_tensor(key: str, value: object) -> bool:
    if not isinstance(value, torch.Tensor):
        raise CheckpointError(
            "The optimizer keeps a value that is no tensor",
            where=f"state {key!r}",
            found=type(value).__name__,
            fix="Use an optimizer of torch.optim, or keep the value as a 0-d tensor.",
        )
    return True


def _locate(
    kind: TensorKind, name: str, tensor: torch.Tensor, *, grid: Grid, stored: Stored | None
) -> Iterator[LiveTensor]:
    """Yield the live tensor that `tensor` is, or nothing where this rank has no part of it."""
    shape = tuple(tensor.shape)
    layout = stored or Stored(shape, shape)
    coordinate = _own_coordinate(tensor)
    if coordinate is None:
        return
    box, replicas = placed_box(name, tensor, coordinate, grid)
    local = local_of(tensor)
    if tuple(local.shape) != box.shape:
        raise CheckpointError(
            "A shard has another shape than its placement says", where=name, expected=box, found=local.shape
        )
    kept = intersect(box, whole(layout.view))
    if kept != box:
        inner = relative(kept, box)
        for dim, (at, size) in enumerate(zip(inner.offset, inner.shape, strict=True)):
            local = local.narrow(dim, min(at, local.shape[dim]), size)
    yield LiveTensor(TensorSpec(kind, name, layout.shape, tensor.dtype, layout.view), kept, local, replicas)


def placed_box(
    name: str, tensor: torch.Tensor, coordinate: Mapping[str, int], grid: Grid
) -> tuple[Box, tuple[int, ...]]:
    """Return the box of a tensor at a coordinate, in closed form, and the ranks that hold the same one.

    Args:
        coordinate: a place on the axes of the tensor's mesh, this rank's or any other.

    Raises:
        CheckpointError: for a placement that is no box.
    """
    if not is_dtensor(tensor):
        return whole(tuple(tensor.shape)), grid.holders({})
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    splits: list[Split] = []
    fixed: dict[str, int] = {}
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    for axis, (axis_name, placement) in enumerate(zip(_axes(mesh), tensor.placements, strict=True)):  # type: ignore[attr-defined]
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise CheckpointError("A tensor's placement is no box", where=name, found=placement, fix="Redistribute it.")
        # In some releases a strided shard is a plain one's subclass, in others it is not.
        strided = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        splits.append(Split(placement.dim, coordinate[axis_name], mesh.size(axis), strided))
        fixed[axis_name] = coordinate[axis_name]
    try:
        box = box_of_splits(tuple(tensor.shape), splits)
    except ValueError as error:
        raise CheckpointError("A tensor's placement is no box", where=name, found=error) from error
    return box, _grid_of(tensor, grid).holders(fixed)


def _own_coordinate(tensor: torch.Tensor) -> dict[str, int] | None:
    """Return this rank's place on the axes of a tensor's mesh, or None where it is not on it."""
    if not is_dtensor(tensor):
        return {}
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate()
    return None if coordinate is None else dict(zip(_axes(mesh), coordinate, strict=True))


def _grid_of(owner: torch.Tensor | None, grid: Grid) -> Grid:
    """Return the grid on which a DTensor lives: `grid` if that has the axes of its mesh, else its mesh."""
    if owner is None:
        return grid
    mesh = owner.device_mesh  # type: ignore[attr-defined]
    names = _axes(mesh)
    return grid if set(names) <= set(grid.axes) else Grid(mesh.mesh.numpy(), names)


def _axes(mesh: Any) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or (f"axis {number}" for number in range(mesh.ndim)))
