"""Tensor and sequence parallelism: the weights of single-device modules cut over one mesh axis, from outside.

Source: Shoeybi et al. 2019, "Megatron-LM", and Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models" (sequence parallelism), on torch's DTensor styles.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from models import families
from models.layers import Conv1D, Dropout, FusedConv1D, Site, token_loss
from models.network import Model
from models.spec import Cut

__all__ = [
    "gather_logits",
    "loss_parallel",
    "reduce_partial_gradients",
    "shard",
    "shards_of_dropout",
    "vocab_parallel_cross_entropy",
]

_SEQUENCE = 1  # the dimension of [batch, sequence, width] that sequence parallelism cuts
_HEADS = 2  # the dimension of [batch, sequence, heads, head width] that tensor parallelism cuts


def shard(model: Model, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Cut a model, or one stage of it, over a one-dimensional mesh.

    Every attention head lies on one rank, the vocabulary is cut by rows. With `sequence_parallel`, what lies between
    the cut products (norms, residuals, their dropout) is cut along the sequence. Logits stay cut: the loss is to be
    computed by `vocab_parallel_cross_entropy`. Afterwards tied weights must be bound again.
    """
    parallelize_module(model, mesh, _styles(model, Shard(_SEQUENCE) if sequence_parallel else Replicate()))
    if sequence_parallel:
        model.sequence_shards = mesh.size()
    for name in shards_of_dropout(model, sequence_parallel=sequence_parallel):
        cast(Dropout, model.get_submodule(name)).shard = mesh.get_local_rank()


def shards_of_dropout(model: nn.Module, *, sequence_parallel: bool) -> set[str]:
    """Return the dropout sites at which ranks hold different parts of one activation, so that masks must differ.

    Heads are always spread; what lies between the cut products is with sequence parallelism, but for the embedding's
    dropout, which is drawn before the cut. Everywhere else the ranks hold the same and must draw the same.
    """
    sites = {name: module.site for name, module in model.named_modules() if isinstance(module, Dropout)}
    whole = {Site.embedding} if sequence_parallel else set(Site) - {Site.attention}
    return {name for name, site in sites.items() if site not in whole}


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, mesh: DeviceMesh, *, rows: int
) -> torch.Tensor:
    """Return the mean cross entropy of logits whose vocabulary is cut over the mesh, 0-d float32, equal on all ranks.

    The whole logits are never gathered. To be called, and differentiated, under torch's `loss_parallel`.

    Args:
        logits: [batch, sequence, local rows]; targets: int64 [batch, sequence].
        rows: rows of the whole vocabulary, padding included.
    """
    size = torch.Size((*logits.shape[:-1], rows))
    stride = (size[1] * rows, rows, 1)
    whole = DTensor.from_local(logits, mesh, (Shard(-1),), run_check=False, shape=size, stride=stride)
    return cast(DTensor, token_loss(whole, targets)).to_local()


def gather_logits(logits: torch.Tensor, mesh: DeviceMesh, *, rows: int) -> torch.Tensor:
    """Return logits [batch, local rows], whose vocabulary is cut over the mesh, with all rows. A collective call.

    Args:
        rows: rows of the whole vocabulary, padding included.
    """
    size = torch.Size((logits.shape[0], rows))
    cut = DTensor.from_local(logits, mesh, (Shard(-1),), run_check=False, shape=size, stride=(rows, 1))
    return cut.full_tensor()


def reduce_partial_gradients(model: nn.Module) -> None:
    """Sum the gradients of weights whole on every rank that each rank has for its part of the sequence only."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != cast(DTensor, parameter).placements:
            parameter.grad = gradient.redistribute(placements=cast(DTensor, parameter).placements)


def _styles(model: Model, between: Placement) -> dict[str, ParallelStyle]:
    """Return torch's style for each module of the family's plan that this stage has; see `Cut` for `between`."""
    spec = families.spec_of(model.config)
    cuts = dict(spec.plan.ends)
    for layer in model.stage.layers:
        cuts |= {f"{spec.blocks}.{layer}.{name}": cut for name, cut in spec.plan.block.items()}
    modules = dict(model.named_modules())
    styles = {name: _style(cut, modules[name], between) for name, cut in cuts.items() if name in modules}
    return {name: style for name, style in styles.items() if style is not None}


def _style(cut: Cut, module: nn.Module, between: Placement) -> ParallelStyle | None:
    """Return the style of one module, None for one that is left as it is."""
    is_cut = isinstance(between, Shard)
    match cut:
        case Cut.columns if isinstance(module, FusedConv1D):
            return FusedColumns()
        case Cut.columns:
            return Columns() if isinstance(module, Conv1D) else ColwiseParallel()
        case Cut.rows:
            return Rows(between) if isinstance(module, Conv1D) else RowwiseParallel(output_layouts=between)
        case Cut.gather:
            return _gathered(between, inputs=len(inspect.signature(module.forward).parameters))
        case Cut.embedding:
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        case Cut.whole_embedding:
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        case Cut.scatter:
            return PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=between) if is_cut else None
        case Cut.sequence_norm:
            return SequenceParallel() if is_cut else None
        case Cut.head_norm:
            return SequenceParallel(sequence_dim=_HEADS, use_local_output=True)
        case Cut.output:
            return ColwiseParallel(input_layouts=between, output_layouts=Shard(-1))


def _gathered(between: Placement, *, inputs: int) -> PrepareModuleInput:
    """Make the first of a module's inputs whole, once for all products that read it."""
    rest = (None,) * (inputs - 1)
    return PrepareModuleInput(input_layouts=(between, *rest), desired_input_layouts=(Replicate(), *rest))


class Columns(ParallelStyle):
    """Cut a Conv1D [in, out] by its outputs; a whole input gives an output that is cut in its last dimension."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        placements = {"weight": Shard(1), "bias": Shard(0)}
        return distribute_module(module, device_mesh, _partition(placements), _input_is(Replicate()), _to_local)


class Rows(ParallelStyle):
    """Cut a Conv1D [in, out] by its inputs; the partial products are summed into the layout `output`."""

    def __init__(self, output: Placement) -> None:
        super().__init__()
        self._output = output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def output_fn(_: nn.Module, output: DTensor, __: DeviceMesh) -> Any:
            return output.redistribute(placements=(self._output,)).to_local()

        placements: dict[str, Placement] = {"weight": Shard(0), "bias": Replicate()}
        return distribute_module(module, device_mesh, _partition(placements), _input_is(Shard(-1)), output_fn)


class FusedColumns(ParallelStyle):
    """Cut a FusedConv1D [in, parts, out] by its outputs, so that each rank has the same heads of every part.

    The product runs on local tensors: flattening `parts` and a cut `out` into one dimension is no DTensor layout.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def forward(self: FusedConv1D, x: torch.Tensor) -> torch.Tensor:
            whole = x if isinstance(x, DTensor) else DTensor.from_local(x, device_mesh, (Replicate(),), run_check=False)
            # Each rank has the input's gradient from its own columns only.
            local = whole.to_local(grad_placements=(Partial(),))
            weight, bias = _local(self.weight).to(local.dtype), _local(self.bias).to(local.dtype)
            return F.linear(local, weight.flatten(1).t(), bias.flatten()).view(*local.shape[:-1], *bias.shape)

        distribute_module(module, device_mesh, _partition({"weight": Shard(2), "bias": Shard(1)}))
        module.forward = MethodType(forward, module)
        return module


def _partition(placements: Mapping[str, Placement]) -> Any:
    def partition(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, placement in placements.items():
            parameter = getattr(module, name)
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [placement])))

    return partition


def _input_is(placement: Placement) -> Any:
    def input_fn(_: nn.Module, inputs: tuple[torch.Tensor, ...], mesh: DeviceMesh) -> tuple[DTensor, ...]:
        x = inputs[0]
        return (x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, (placement,), run_check=False),)

    return input_fn


def _to_local(_: nn.Module, output: DTensor, __: DeviceMesh) -> Any:
    return output.to_local()


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return cast(DTensor, parameter).to_local()
