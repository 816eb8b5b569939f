"""Tensor and sequence parallelism: the weights of single-device modules cut over one mesh axis, from outside.

Source: Shoeybi et al. 2019, "Megatron-LM", and Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models" (sequence parallelism), on torch's DTensor styles.
"""

from __future__ import annotations

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

from models.families import Model
from models.gpt2 import GPT2
from models.layers import Dropout, FusedConv1D, token_loss
from models.llama3 import Llama3

__all__ = [
    "gather_logits",
    "loss_parallel",
    "reduce_partial_gradients",
    "shard",
    "shards_of_dropout",
    "vocab_parallel_cross_entropy",
]

_SEQUENCE = 1  # the dimension of [batch, sequence, width] that sequence parallelism cuts


def shard(model: Model, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Cut a model, or one stage of it, over a one-dimensional mesh.

    Every attention head lies on one rank, the vocabulary is cut by rows. With `sequence_parallel`, what lies between
    the cut products (norms, residuals, their dropout) is cut along the sequence. Logits stay cut: the loss is to be
    computed by `vocab_parallel_cross_entropy`. Afterwards tied weights must be bound again.
    """
    between: Placement = Shard(_SEQUENCE) if sequence_parallel else Replicate()
    plan = _gpt2_plan(model, between) if isinstance(model, GPT2) else _llama3_plan(model, between)
    parallelize_module(model, mesh, plan)
    if isinstance(model, Llama3) and sequence_parallel:
        model.sequence_shards = mesh.size()
    for name in shards_of_dropout(model, sequence_parallel=sequence_parallel):
        cast(Dropout, model.get_submodule(name)).shard = mesh.get_local_rank()


def shards_of_dropout(model: nn.Module, *, sequence_parallel: bool) -> set[str]:
    """Return the dropout sites at which ranks hold different parts of one activation, so that masks must differ.

    Heads are always spread; what lies between the cut products is with sequence parallelism, but for the embedding's
    dropout, which is drawn before the cut. Everywhere else the ranks hold the same and must draw the same.
    """
    sites = (name for name, module in model.named_modules() if isinstance(module, Dropout))
    return {name for name in sites if name.endswith("attn_dropout") or (sequence_parallel and ".h." in name)}


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


def _ends_plan(model: Model, embedding: str, norm: str, *, between: Placement, embedded: Placement) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    if model.stage.first:
        plan[embedding] = RowwiseParallel(input_layouts=Replicate(), output_layouts=embedded)
    if model.stage.last:
        if isinstance(between, Shard):
            plan[norm] = SequenceParallel()
        plan["lm_head"] = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1))
    return plan


def _gpt2_plan(model: Model, between: Placement) -> dict[str, Any]:
    # Positions are added to whole embeddings, so these are cut along the sequence behind their dropout.
    plan = _ends_plan(model, "transformer.wte", "transformer.ln_f", between=between, embedded=Replicate())
    if model.stage.first and isinstance(between, Shard):
        plan["dropout"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=between)
    for layer in model.stage.layers:
        block = f"transformer.h.{layer}."
        plan |= {
            f"{block}attn": _gathered(between, inputs=2),
            f"{block}attn.c_attn": FusedColumns(),
            f"{block}attn.c_proj": Rows(between),
            f"{block}mlp": _gathered(between, inputs=2),
            f"{block}mlp.c_fc": Columns(),
            f"{block}mlp.c_proj": Rows(between),
        }
        if isinstance(between, Shard):
            plan |= {f"{block}ln_1": SequenceParallel(), f"{block}ln_2": SequenceParallel()}
    return plan


def _llama3_plan(model: Model, between: Placement) -> dict[str, Any]:
    plan = _ends_plan(model, "model.embed_tokens", "model.norm", between=between, embedded=between)
    for layer in model.stage.layers:
        block = f"model.layers.{layer}."
        plan |= {
            f"{block}self_attn": _gathered(between, inputs=3),
            f"{block}self_attn.q_proj": ColwiseParallel(),
            f"{block}self_attn.k_proj": ColwiseParallel(),
            f"{block}self_attn.v_proj": ColwiseParallel(),
            f"{block}self_attn.o_proj": RowwiseParallel(output_layouts=between),
            f"{block}mlp": _gathered(between, inputs=1),
            f"{block}mlp.gate_proj": ColwiseParallel(),
            f"{block}mlp.up_proj": ColwiseParallel(),
            f"{block}mlp.down_proj": RowwiseParallel(output_layouts=between),
        }
        if isinstance(between, Shard):
            plan |= {
                f"{block}input_layernorm": SequenceParallel(),
                f"{block}post_attention_layernorm": SequenceParallel(),
            }
    return plan


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
