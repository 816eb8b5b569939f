"""A model's and its optimizer's live tensors, with their names and boxes on disk.

No other module reads DTensor internals.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from reprise.errors import CheckpointError
from reprise.format.box import Box, Split, box_of_splits, intersect, relative, whole
from reprise.format.layout import TensorKind, TensorSpec
from reprise.storage.json_file import Document
from reprise.tensors.dtypes import stored_dtype

if sys.byteorder != "little":  # memory is written unconverted
    raise ImportError("Checkpoints are little-endian, and this host is not")

Array = npt.NDArray[np.void]
Marks = tuple[object, ...]

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
# The attributes of torch.distributed.checkpoint.protocol.CheckpointableTensor, new in torch 2.14: DCP saves a tensor
# with them as shards of a global tensor.
GLOBAL_PLACE = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


@dataclass(frozen=True, slots=True)
class Stored:
    """A parameter's on-disk form, if it differs from the live form.

    Args:
        shape: The shape on disk.
        view: The same C-ordered bytes' shape with the live parameter's dimensions. The live parameter may be larger
            (padding): elements outside `view` are not stored.
    """

    shape: tuple[int, ...]
    view: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A rank's part of a logical tensor.

    Args:
        box: Its position, in `spec.view` coordinates.
        local: The live memory, shaped `box.shape`. Writing to it changes the model.
        replicas: All global ranks with this box, in ascending order.
        is_copy: Whether this is a second live copy of a tensor saved by other ranks. A load fills it, a save skips it.
        is_new: Whether a load allocated it for itself, so nobody sees its content before the load ends.
    """

    spec: TensorSpec
    box: Box
    local: torch.Tensor
    replicas: tuple[int, ...]
    is_copy: bool = False
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class Contents:
    """A checkpoint's whole content, as seen from a rank.

    Args:
        specs: Every tensor in the checkpoint in model order, equal on all ranks.
        live: The parts on this rank.
        aliases: Stored tensors' second names (tied parameters), alias -> stored name. Only the stored name's tensor is
            saved, so the caller guarantees that both tensors are equal.
        documents: Files beside the tensors, by file name: JSON, or raw bytes. Only rank 0's are written.
        optimizers: The optimizers that update the live tensors. A background save delays their next step while it reads
            tensors that the step changes. Tensors outside these optimizers are copied.
        constant: Live tensors that do not change during a save and need no copy.
        syncs: Calls that make durable anything the checkpoint must not precede, such as a log. The renaming rank makes
            them on a background thread, together with the syncs before the rename. They raise only OSError.
        notes: calls after the commit, for a record of it. The ranks that rename make them on a background thread; they
            raise nothing.
    """

    specs: tuple[TensorSpec, ...]
    live: tuple[LiveTensor, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    documents: Mapping[str, Document] = field(default_factory=dict)
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    constant: tuple[torch.Tensor, ...] = ()
    syncs: tuple[Callable[[], None], ...] = ()
    notes: tuple[Callable[[], None], ...] = ()

    @property
    def has_optimizer(self) -> bool:
        return any(spec.kind is TensorKind.OPTIMIZER for spec in self.specs)


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks holding a model or a pipeline stage, as an array over named axes.

    A tensor without a placement on an axis is replicated along it. A plain tensor is replicated along all axes.
    """

    ranks: npt.NDArray[np.int64]
    axes: tuple[str, ...]

    @staticmethod
    def flat(world_size: int) -> Grid:
        """Return a grid with all ranks on a single axis, whose name no mesh uses."""
        return Grid(np.arange(world_size), ("",))

    def holders(self, fixed: Mapping[str, int]) -> tuple[int, ...]:
        """Return the ranks at the `fixed` coordinates, in ascending order."""
        index = tuple(fixed.get(axis, slice(None)) for axis in self.axes)
        return tuple(sorted(np.ravel(self.ranks[index]).tolist()))


def free_gathered_parameters(model: nn.Module) -> None:
    """Free every gathered FSDP2 parameter, so that `named_parameters()` returns the optimizer's parameters again.

    After a forward pass without gradients FSDP2 may hold unsharded plain tensors. A save would see wrong boxes, and a
    load would leave the shards stale.
    """
    for module in model.modules():
        if is_fsdp_module(module):
            module.reshard()  # type: ignore[operator]


def live_tensors(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    grid: Grid,
    stored: Mapping[str, Stored] | None = None,
) -> Iterator[LiveTensor]:
    """Yield every tensor in the state: parameters, persistent buffers, then optimizer state.

    Optimizer state comes moment by moment, each in model order, scalars last.

    Args:
        grid: The ranks holding this model.
        stored: On-disk forms that differ from the live ones, by parameter name.

    Raises:
        CheckpointError: A tensor is not a box, or its dtype cannot be stored.
    """
    free_gathered_parameters(model)
    stored, tensors = stored or {}, dict[torch.Tensor, str]()
    for name, tensor in named_tensors(model):
        tensors.setdefault(tensor, name)
    for tensor, name in tensors.items():
        yield from locate(TensorKind.MODEL, name, tensor.detach(), grid=grid, stored=stored.get(name))
    if optimizer is None:
        return
    rows = [
        (key, parameter, name, value)
        for parameter, name in parameter_names(model).items()
        for key, value in optimizer.state.get(parameter, {}).items()
    ]
    for key, parameter, name, value in sorted(rows, key=lambda row: (row[3].ndim == 0, row[0])):
        form = stored.get(name) if value.shape == parameter.shape else None
        place = _grid_of(parameter, grid)
        yield from locate(TensorKind.OPTIMIZER, f"{key}.{name}", value, grid=place, stored=form)


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return every parameter's canonical name, in model order. A tied parameter keeps the first registered name."""
    return {parameter: canonical_name(name) for name, parameter in model.named_parameters()}


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers in model order, tied ones under each name."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield canonical_name(name), parameter
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                yield canonical_name(f"{prefix}.{name}" if prefix else name), buffer


def canonical_name(name: str) -> str:
    """Return a parameter's name without prefixes from torch's wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's or DTensor's memory on this rank, detached."""
    # DTensor calls go through its dispatcher, which takes tens of microseconds.
    holder = memory_holder(tensor)
    return holder.detach() if holder.requires_grad else holder


def memory_holder(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor that holds a tensor's or DTensor's memory."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def order_in_memory(tensor: torch.Tensor) -> list[int] | None:
    """Return a plain tensor's dimensions from the outermost in memory, or None if they are in C order."""
    if is_dtensor(tensor) or tensor.is_contiguous():
        return None
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return order if tensor.permute(order).is_contiguous() else None


def with_memory(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor placed like `tensor`, plain or a DTensor, with local memory `local`, maybe of more dimensions.

    The memory may be on the host while the mesh has devices, as for parameters offloaded by FSDP2.
    """
    if not is_dtensor(tensor):
        return local
    from torch.distributed.tensor import DTensor

    from reprise.torch_private import DTensorSpec, TensorMeta

    further = local.shape[tensor.ndim :]
    like = torch.empty((*tensor.shape, *further), device="meta") if further else tensor
    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    spec = DTensorSpec(tensor.device_mesh, tensor.placements, tensor_meta=meta)  # type: ignore[attr-defined]
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def identity_of(tensor: torch.Tensor) -> object:
    """Return a value equal for two tensors exactly if they have the same memory and shape."""
    local = memory_holder(tensor)
    return local.untyped_storage()._cdata, local.data_ptr(), tensor.shape, local.shape, local.stride(), local.dtype


def memory_marks(model: nn.Module, optimizer: torch.optim.Optimizer) -> Marks:
    """Return a value that changes if a tensor in the state was replaced or moved.

    Frees gathered FSDP2 parameters first, as enumerating the state does.
    """
    free_gathered_parameters(model)
    return tuple(map(identity_of, (*model.parameters(), *model.buffers(), *_stepped_tensors(optimizer))))


def storages_of(optimizers: Iterable[torch.optim.Optimizer], constant: Iterable[torch.Tensor] = ()) -> frozenset[int]:
    """Return the addresses of all storages that only these optimizers' steps change, or nothing at all.

    Args:
        constant: Constant tensors, beside the optimizers' parameters and state.
    """
    tensors = (tensor for optimizer in optimizers for tensor in _stepped_tensors(optimizer))
    return frozenset(local_of(tensor).untyped_storage().data_ptr() for tensor in (*tensors, *constant))


def _stepped_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's parameters and their state."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    values = (value for p in parameters for value in (p, *optimizer.state.get(p, {}).values()))
    return [value for value in values if isinstance(value, torch.Tensor)]


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_described(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return whether a tensor describes itself as shards of a global tensor."""
    return all(hasattr(tensor, name) for name in GLOBAL_PLACE)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a rank's part of a global tensor."""
    return is_dtensor(tensor) or is_described(tensor)


def is_fsdp_module(module: nn.Module) -> bool:
    """Return whether a module is sharded by FSDP2, without importing FSDP2."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def locate(
    kind: TensorKind, name: str, tensor: torch.Tensor, *, grid: Grid, stored: Stored | None = None
) -> Iterator[LiveTensor]:
    """Yield the live tensor for `tensor`, or nothing if this rank has no part in it.

    Args:
        grid: The ranks holding a plain tensor.
        stored: Its on-disk form, if it differs from the live form.

    Raises:
        CheckpointError: The placement is not a box, or safetensors lacks the dtype.
    """
    shape = tuple(tensor.shape)
    layout = stored or Stored(shape, shape)
    if is_dtensor(tensor) and tensor.device_mesh.get_coordinate() is None:  # type: ignore[attr-defined]
        return
    box, replicas = placed_box(name, tensor, grid)
    local = local_of(tensor)
    if tuple(local.shape) != box.shape:
        raise CheckpointError(
            "A shard's shape does not match its placement", where=name, expected=box, found=local.shape
        )
    stored_box = intersect(box, whole(layout.view))
    if stored_box != box:
        local = local[relative(stored_box, box).slices]
    spec = TensorSpec(kind, name, layout.shape, stored_dtype(tensor.dtype, where=name), layout.view)
    yield LiveTensor(spec, stored_box, local, replicas)


def placed_box(
    name: str, tensor: torch.Tensor, grid: Grid, coordinate: Mapping[str, int] | None = None
) -> tuple[Box, tuple[int, ...]]:
    """Return a tensor's box at a coordinate, in closed form, and the ranks with the same box.

    Args:
        coordinate: A coordinate on the tensor's mesh axes. By default this rank's.

    Raises:
        CheckpointError: The placement is not a box.
    """
    if not is_dtensor(tensor):
        return whole(tuple(tensor.shape)), grid.holders({})
    from torch.distributed.tensor import Replicate, Shard

    from reprise.torch_private import _StridedShard

    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    axes, splits = _axes(mesh), dict[str, Split]()
    coordinate = coordinate or dict(zip(axes, mesh.get_coordinate(), strict=True))
    try:
        for axis, count, placement in zip(axes, mesh.shape, tensor.placements, strict=True):  # type: ignore[attr-defined]
            if isinstance(placement, Replicate):
                continue
            # In some torch releases _StridedShard is a subclass of Shard, in others it is not.
            if not isinstance(placement, Shard | _StridedShard):
                raise ValueError(str(placement))
            strided = int(getattr(placement, "split_factor", 1))
            splits[axis] = Split(placement.dim, coordinate[axis], count, strided)
        box = box_of_splits(tuple(tensor.shape), [*splits.values()])
    except ValueError as error:
        raise CheckpointError(
            "A tensor's placement is not a box", where=name, found=error, fix="Redistribute it."
        ) from error
    return box, _grid_of(tensor, grid).holders({axis: split.index for axis, split in splits.items()})


def _grid_of(owner: torch.Tensor, grid: Grid) -> Grid:
    """Return a tensor's grid: `grid` if it has all axes of a DTensor's mesh, otherwise the mesh."""
    if not is_dtensor(owner):
        return grid
    mesh = owner.device_mesh  # type: ignore[attr-defined]
    names = _axes(mesh)
    return grid if set(names) <= set(grid.axes) else Grid(mesh.mesh.numpy(), names)


def _axes(mesh: Any) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or (f"axis {number}" for number in range(mesh.ndim)))


def require_plain(where: Callable[[], str], local: torch.Tensor) -> None:
    """Require strided memory on a device.

    Args:
        where: Returns the tensor's place, for errors.

    Raises:
        CheckpointError: Names a meta, sparse, nested, quantized or lazy tensor, or one with its memory elsewhere.
    """
    kind = type(local)
    kinds = {
        kind.__name__: is_lazy(local) or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__,
        "sparse": local.layout is not torch.strided,
        "nested": local.is_nested,
        "quantized": local.is_quantized,
        "meta": local.is_meta,
    }
    if True in kinds.values():
        raise CheckpointError(
            "A tensor is not plain memory",
            where=where(),
            expected="a strided tensor of numbers",
            found=", ".join(kind for kind, is_one in kinds.items() if is_one),
            fix="Materialize or clone it (a lazy module needs a sample), store its parts as tensors of their own, or "
            "keep it out of the state.",
        )


def check_disjoint(tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Refuse tensors that share memory: a load fills both, and the later wins.

    Args:
        tensors: Tensors in storable form, each once.

    Raises:
        CheckpointError: Names the first two.
    """
    parts = [part for part in tensors if part[1].numel()]
    open_parts: list[tuple[str, torch.Tensor, Array]] = []
    for name, local in sorted(parts, key=lambda part: (str(part[1].device), part[1].data_ptr())):
        addresses = _addresses(local)
        open_parts = [
            part for part in open_parts if part[1].device == local.device and np.may_share_memory(part[2], addresses)
        ]
        for neighbor, _, taken in open_parts:
            if np.shares_memory(taken, addresses):
                raise CheckpointError(
                    "Two tensors share memory without being the same tensor",
                    where=" and ".join(sorted((neighbor, name))),
                    fix="Tie them by assigning one and the same parameter, or clone one of them.",
                )
        open_parts.append((name, local, addresses))


def _addresses(local: torch.Tensor) -> Array:
    """Return an array at a tensor's addresses, which may lie on a device and are not read."""
    interface = {
        "data": (local.data_ptr(), True),
        "shape": local.shape,
        "strides": tuple(stride * local.itemsize for stride in local.stride()),
        "typestr": f"|V{local.itemsize}",
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
