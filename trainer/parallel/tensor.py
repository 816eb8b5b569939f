"""Tensor and sequence parallelism: shards the weights of single-device modules over a mesh axis.

Source: Shoeybi et al. 2019, "Megatron-LM", and Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models" (sequence parallelism), built on torch's DTensor styles.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any, cast

import torch
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
    parallelize_module,
)
from torch.distributed.tensor.parallel import (
    loss_parallel as loss_parallel,
)

from models import families
from models.layers import Conv1D, Dropout, Site, project, token_loss
from models.network import Model
from models.spec import Cut

_SEQUENCE = 1  # the dimension of [batch, sequence, width] sharded by sequence parallelism
_HEADS = 2  # the dimension of [batch, sequence, heads, head width] sharded by tensor parallelism


def shard(model: Model, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Shard a model or stage over a one-dimensional mesh.

    Attention is sharded by heads and the vocabulary by rows. With `sequence_parallel`, norms, residuals and their
    dropout are sharded along the sequence. Logits stay sharded, and `vocab_parallel_cross_entropy` computes the loss.
    The caller must tie weights again afterwards.
    """
    parallelize_module(model, mesh, _styles(model, Shard(_SEQUENCE) if sequence_parallel else Replicate()))
    if sequence_parallel:
        model.sequence_shards = mesh.size()
    for name in shards_of_dropout(model, sequence_parallel=sequence_parallel):
        cast(Dropout, model.get_submodule(name)).shard = mesh.get_local_rank()


def shards_of_dropout(model: nn.Module, *, sequence_parallel: bool) -> set[str]:
    """Return the names of dropout modules with sharded activations, whose masks must differ between ranks.

    Attention dropout is always sharded, by heads. With sequence parallelism all other dropout is sharded too, except
    the embedding's, which precedes the sharding. At every other site the ranks hold replicas and must draw the same
    mask.
    """
    sites = {name: module.site for name, module in model.named_modules() if isinstance(module, Dropout)}
    replicated = {Site.embedding} if sequence_parallel else set(Site) - {Site.attention}
    return {name for name, site in sites.items() if site not in replicated}


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, mesh: DeviceMesh, *, rows: int
) -> torch.Tensor:
    """Return the mean cross entropy, 0-d float32, equal on all ranks, from logits sharded over the vocabulary.

    The logits are never gathered. Forward and backward must run under torch's `loss_parallel`.

    Args:
        logits: [batch, sequence, local rows].
        targets: int64 [batch, sequence].
        rows: Rows in the whole vocabulary, including padding.
    """
    size = torch.Size((*logits.shape[:-1], rows))
    stride = (size[1] * rows, rows, 1)
    full_logits = DTensor.from_local(logits, mesh, (Shard(-1),), run_check=False, shape=size, stride=stride)
    return cast(DTensor, token_loss(full_logits, targets)).to_local()


def reduce_partial_gradients(model: nn.Module) -> None:
    """Sum replicated weights' partial gradients, which each rank computes only for its part of the sequence."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != cast(DTensor, parameter).placements:
            parameter.grad = gradient.redistribute(placements=cast(DTensor, parameter).placements)


def _styles(model: Model, between: Placement) -> dict[str, ParallelStyle]:
    """Return torch's style for each module in the family's plan and this stage. `Cut` defines `between`."""
    spec = families.spec_of(model.config)
    cuts = dict(spec.plan.ends)
    for layer in model.stage.layers:
        cuts |= {f"{spec.blocks}.{layer}.{name}": cut for name, cut in spec.plan.block.items()}
    modules = dict(model.named_modules())
    styles = {name: _style(cut, modules[name], between) for name, cut in cuts.items() if name in modules}
    return {name: style for name, style in styles.items() if style is not None}


def _style(cut: Cut, module: nn.Module, between: Placement) -> ParallelStyle | None:
    """Return a module's style, or None to leave it unchanged."""
    is_cut = isinstance(between, Shard)
    match cut:
        case Cut.columns:
            return Columns() if isinstance(module, Conv1D) else ColwiseParallel()
        case Cut.rows:
            return Rows(between) if isinstance(module, Conv1D) else RowwiseParallel(output_layouts=between)
        case Cut.gather:
            return _gather_input(between, inputs=len(inspect.signature(module.forward).parameters))
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


def _gather_input(between: Placement, *, inputs: int) -> PrepareModuleInput:
    """Gather a module's first input, once for all its products."""
    unchanged = (None,) * (inputs - 1)
    return PrepareModuleInput(input_layouts=(between, *unchanged), desired_input_layouts=(Replicate(), *unchanged))


class Columns(ParallelStyle):
    """Shards a Conv1D [in, ...out] by outputs: each rank has the same heads in every part of a fused projection.

    The product runs on local tensors, because no DTensor layout describes `parts` and a sharded `out` flattened into a
    single dimension.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def forward(self: Conv1D, x: torch.Tensor) -> torch.Tensor:
            # Each rank has the input's gradient from its own columns only.
            local = on_mesh(x, device_mesh).to_local(grad_placements=(Partial(),))
            return project(local, _local(self.weight), _local(self.bias))

        distribute(module, device_mesh, weight=Shard(-1), bias=Shard(-1))
        module.forward = MethodType(forward, module)
        return module


class Rows(ParallelStyle):
    """Shards a Conv1D [in, out] by inputs. Partial products are summed into the layout `output`."""

    def __init__(self, output: Placement) -> None:
        super().__init__()
        self._output = output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def input_fn(_: nn.Module, inputs: tuple[torch.Tensor, ...], mesh: DeviceMesh) -> Any:
            return (on_mesh(inputs[0], mesh, Shard(-1)),)

        def output_fn(_: nn.Module, output: DTensor, __: DeviceMesh) -> Any:
            return output.redistribute(placements=(self._output,)).to_local()

        distribute(module, device_mesh, weight=Shard(0), bias=Replicate())
        return distribute_module(module, device_mesh, None, input_fn, output_fn)


def distribute(module: nn.Module, mesh: DeviceMesh, **placements: Placement) -> None:
    """Distribute a module's parameters over a mesh, each by its placement."""
    for name, placement in placements.items():
        parameter = getattr(module, name)
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [placement])))


def on_mesh(x: torch.Tensor, mesh: DeviceMesh, placement: Placement = Replicate()) -> DTensor:  # noqa: B008
    """Return an activation as a DTensor, which a local one has on each rank by its placement."""
    return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, (placement,), run_check=False)


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return cast(DTensor, parameter).to_local()
