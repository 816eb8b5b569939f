"""The same gradient, bit for bit, on any number of data-parallel ranks: lanes of micro-batches, added in a tree.

A parameter's gradient is the sum of its lane gradients, added in the tree from `trainer.parallel.lanes` and divided
once by the micro-batch count. `ShardedLanes` reduces every lane over ranks and adds the tree's upper levels in shards.
`LocalLanes` adds a block of lanes on the rank and reduces once. Both use the same tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from models.layers import OutputGradient
from models.network import Model
from reprise.tensors import is_dtensor, local_of, with_memory
from reprise.torch_private import _flatten_dense_tensors, _unflatten_dense_tensors
from trainer.parallel.data import buckets, set_gradient_sync, sharded_modules
from trainer.parallel.halving import sum_all, sum_scatter
from trainer.parallel.lanes import Lanes, PairwiseSum
from trainer.parallel.pipeline import tied_parameters
from trainer.parallel.reduction import GradientReduction


class ShardedLanes(GradientReduction):
    """Reduction for ZeRO stages 2 and 3: FSDP2 reduces every lane over ranks, then sharded sums are added in the tree.

    Args:
        model: A model sharded over data-parallel ranks.
        parameters: Its trainable parameters.
        copies: The process group of ranks with the same shards, or None.
    """

    def __init__(
        self, model: Model, parameters: Sequence[nn.Parameter], lanes: Lanes, copies: dist.ProcessGroup | None
    ) -> None:
        from trainer.parallel.tree_reduce_scatter import TreeReduceScatter

        self._model, self._parameters, self._lanes, self._copies = model, parameters, lanes, copies
        self._sum = PairwiseSum[list[torch.Tensor]](_add_all)
        for module in sharded_modules(model):
            module.set_custom_reduce_scatter(TreeReduceScatter())
            # Sum over ranks; do not average.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        output = keep_ends_apart(model, lanes)
        if output is not None:
            tied = set(tied_parameters(model))
            (table,) = [unsharded for parameter, unsharded in _unsharded(model) if parameter in tied]
            table.register_post_accumulate_grad_hook(partial(self._add_output_gradient, output))  # type: ignore[no-untyped-call]
        self._passes = 0

    def before_backward(self, number: int, micro_batches: int) -> None:
        self._passes = number + 1
        set_gradient_sync(self._model, is_on=self._ends_lane())

    def after_backward(self, number: int) -> None:
        if self._ends_lane():
            self._sum.push([_take_gradient(parameter) for parameter in self._parameters])

    def finish(self) -> None:
        totals = self._sum.take()
        if self._copies is not None:
            grouped = buckets(totals, lambda total: total.nbytes)
            totals = [total for bucket in grouped for total in _sum_gradients(bucket, self._copies)]
        _set_means(self._parameters, totals, self._lanes.micro_batches)

    def _ends_lane(self) -> bool:
        return self._passes % self._lanes.length == 0

    def _add_output_gradient(self, output: OutputGradient, table: torch.Tensor) -> None:
        """Complete a tied table's unsharded gradient at the end of a lane, before FSDP2 reduces it."""
        if self._ends_lane():
            assert table.grad is not None
            table.grad.add_(output.take())


class LocalLanes(GradientReduction):
    """Reduction for a single rank, ZeRO stages 0 and 1, and pipelines: a rank adds a block of lanes, then ranks reduce.

    It takes each parameter's gradient as soon as autograd accumulates it, so it works inside torch's pipeline
    schedules, which run every stage's backward passes in micro-batch order.

    Args:
        models: This rank's stages.
        data: The mesh of the data-parallel ranks, or of a single copy's ranks, or None.
        copies: See `ShardedLanes`.
        embedding_group: See `MeanReduction`.
    """

    def __init__(
        self,
        models: Sequence[Model],
        lanes: Lanes,
        *,
        zero_stage: int,
        data: DeviceMesh | None,
        copies: dist.ProcessGroup | None,
        embedding_group: dist.ProcessGroup | None,
    ) -> None:
        self._models, self._lanes, self._copies = models, lanes, copies
        self._group = None if data is None else data.get_group()
        self._is_sharded = zero_stage > 0
        self._embedding_group = embedding_group
        self._sums: list[_LaneSums] = []
        for model in models:
            output = keep_ends_apart(model, lanes)
            tied = set(tied_parameters(model))
            for parameter, unsharded in _unsharded(model):
                sums = _LaneSums(parameter, lanes.length)
                if parameter in tied:
                    sums.output, sums.waits = output, embedding_group is not None
                unsharded.register_post_accumulate_grad_hook(sums.accumulate)  # type: ignore[no-untyped-call]
                self._sums.append(sums)

    def before_backward(self, number: int, micro_batches: int) -> None:
        for model in self._models:
            set_gradient_sync(model, is_on=False)

    def finish(self) -> None:
        for bucket in buckets(self._sums, lambda sums: 4 * prod(sums.parameter.shape)):
            totals = [sums.total(self._embedding_group) for sums in bucket]
            parameters = [sums.parameter for sums in bucket]
            if self._group is not None:
                totals = (
                    _sum_scatter_gradients(parameters, totals, self._group)
                    if self._is_sharded
                    else _sum_gradients(totals, self._group)
                )
            if self._copies is not None:
                totals = _sum_gradients(totals, self._copies)
            _set_means(parameters, totals, self._lanes.micro_batches)


class _LaneSums:
    """Sums of a parameter's gradients: over the current lane, and over complete lanes.

    Args:
        parameter: The parameter, whose `grad` is set at the end of an iteration.
        length: Micro-batches per lane.
    """

    def __init__(self, parameter: nn.Parameter, length: int) -> None:
        self.parameter = parameter
        self.output: OutputGradient | None = None  # for a tied table with both ends on this rank
        self.waits = False  # another rank has the other end: lanes wait until both ends' gradients are added
        self._length = length
        self._passes = 0
        self._lane: torch.Tensor | None = None
        self._waiting: list[torch.Tensor] = []
        self._sum = PairwiseSum[torch.Tensor](torch.Tensor.add_)

    def accumulate(self, unsharded: torch.Tensor) -> None:
        """Take a micro-batch's gradient from the unsharded parameter used by the backward pass."""
        gradient, unsharded.grad = unsharded.grad, None
        assert gradient is not None
        self._lane = gradient.float() if self._lane is None else self._lane.add_(gradient)
        self._passes += 1
        if self._passes % self._length:
            return
        lane, self._lane = _over_tensor_parallel(self._lane, unsharded), None
        if self.output is not None:
            lane.add_(local_of(self.output.take()))
        if self.waits:
            self._waiting.append(lane)
        else:
            self._sum.push(lane)

    def total(self, embedding_group: dist.ProcessGroup | None) -> torch.Tensor:
        """Return the sum of all lanes on this rank.

        A collective call for a tied table, on the two ranks with its ends.
        """
        for lane in self._waiting:
            dist.all_reduce(lane, group=embedding_group)  # two ranks, so there is only one order
            self._sum.push(lane)
        self._waiting = []
        return self._sum.take()


def keep_ends_apart(model: Model, lanes: Lanes) -> OutputGradient | None:
    """Make the output layer accumulate a tied table's gradient separately, and return the accumulator.

    Returns None without both ends in the model, with a frozen table, or if a lane is a single micro-batch and a fused
    function adds both ends' gradients.
    """
    embedding = model.tied_embedding()
    if embedding is None or not embedding.weight.requires_grad:
        return None
    if embedding.fuses_tied_gradient and lanes.length == 1:
        embedding.adds_tokens_first = True
        return None
    embedding.output_gradient = OutputGradient()
    return embedding.output_gradient


def _unsharded(model: Model) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Return each trainable parameter with the tensor that accumulates its gradient in a backward pass. Collective.

    That tensor is the same object in all iterations. Without FSDP2 it is the parameter itself. FSDP2 modules are
    gathered individually, because a complete model may not fit into a rank's memory.
    """
    parameters = dict(model.named_parameters())
    unsharded = dict(parameters)
    for module in sharded_modules(model):
        module.unshard()
        gathered = dict(model.named_parameters())
        unsharded |= {name: gathered[name] for name, parameter in parameters.items() if gathered[name] is not parameter}
        module.reshard()
    return [(parameter, unsharded[name]) for name, parameter in parameters.items() if parameter.requires_grad]


def _over_tensor_parallel(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the local gradient, summed over tensor-parallel ranks if each computed only its part of the input."""
    if is_dtensor(gradient) and is_dtensor(parameter):
        return local_of(gradient.redistribute(placements=parameter.placements))  # type: ignore[attr-defined]
    return gradient


def _take_gradient(parameter: nn.Parameter) -> torch.Tensor:
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    return local_of(gradient)


def _add_all(first: list[torch.Tensor], second: list[torch.Tensor]) -> list[torch.Tensor]:
    torch._foreach_add_(first, second)
    return first


def _sum_gradients(gradients: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Sum gradients over ranks, which all pass equal shapes. A collective call."""
    total = sum_all(_flatten_dense_tensors(gradients), group)  # type: ignore[no-untyped-call]
    return list(_unflatten_dense_tensors(total, gradients))  # type: ignore[no-untyped-call]


def _sum_scatter_gradients(
    parameters: Sequence[nn.Parameter], gradients: list[torch.Tensor], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Return this rank's rows of the sums over ranks, as FSDP2 shards the parameters. A collective call."""
    ranks = dist.get_world_size(group)
    # Like FSDP2, cut rows as `torch.chunk` does, and pad every gradient to equal chunks.
    chunks = torch._chunk_cat(gradients, 0, ranks)
    chunk = sum_scatter(chunks.flatten(), group)
    sizes = [-(-gradient.shape[0] // ranks) * prod(gradient.shape[1:]) for gradient in gradients]
    shapes = [local_of(parameter).shape for parameter in parameters]
    return [flat[: shape.numel()].view(shape) for flat, shape in zip(torch.split(chunk, sizes), shapes, strict=True)]


def _set_means(parameters: Sequence[nn.Parameter], totals: list[torch.Tensor], micro_batches: int) -> None:
    torch._foreach_div_(totals, micro_batches)
    for parameter, total in zip(parameters, totals, strict=True):
        parameter.grad = with_memory(parameter, total)
