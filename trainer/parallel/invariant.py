"""The same gradient, bit for bit, on any number of data-parallel ranks: lanes of micro batches, added in a tree.

The gradient of a parameter is the sum of the lanes' gradients in the tree of `trainer.parallel.lanes`, divided once by
the number of micro batches. `ShardedLanes` reduces every lane over ranks and adds the rest of the tree in shards;
`LocalLanes` adds a block of lanes on the rank and reduces once. Both have the same tree.
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
    """ZeRO stages 2 and 3: FSDP2 reduces every lane over ranks, and sharded sums wait for their partner in the tree.

    Args:
        model: sharded over data-parallel ranks.
        parameters: its trainable parameters.
        copies: the group of the ranks with the same shards, or None.
    """

    def __init__(
        self, model: Model, parameters: Sequence[nn.Parameter], lanes: Lanes, copies: dist.ProcessGroup | None
    ) -> None:
        from trainer.parallel.tree_reduce_scatter import TreeReduceScatter

        self._model, self._parameters, self._lanes, self._copies = model, parameters, lanes, copies
        self._sum = PairwiseSum[list[torch.Tensor]](_add_all)
        for module in sharded_modules(model):
            module.set_custom_reduce_scatter(TreeReduceScatter())
            # The sum, not the mean over ranks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        output = keep_ends_apart(model, lanes)
        if output is not None:
            tied = set(tied_parameters(model))
            (table,) = [unsharded for parameter, unsharded in _unsharded(model) if parameter in tied]
            table.register_post_accumulate_grad_hook(partial(self._add_output_gradient, output))  # type: ignore[no-untyped-call]
        self._passes = 0

    def loss_divisor(self, share: float) -> float:
        return 1

    def before_backward(self, number: int, micro_batches: int) -> None:
        self._passes = number + 1
        set_gradient_sync(self._model, is_on=self._ends_lane())

    def after_backward(self, number: int) -> None:
        if self._ends_lane():
            self._sum.push([_taken(parameter) for parameter in self._parameters])

    def finish(self) -> None:
        totals = self._sum.take()
        if self._copies is not None:
            bucketed = buckets(totals, lambda total: total.nbytes)
            totals = [total for bucket in bucketed for total in _summed(bucket, self._copies)]
        _set_means(self._parameters, totals, self._lanes.micro_batches)

    def _ends_lane(self) -> bool:
        return self._passes % self._lanes.length == 0

    def _add_output_gradient(self, output: OutputGradient, table: torch.Tensor) -> None:
        """Complete the unsharded gradient of a tied table at the end of a lane, before FSDP2 reduces it."""
        if self._ends_lane():
            assert table.grad is not None
            table.grad.add_(output.take())


class LocalLanes(GradientReduction):
    """A single rank, ZeRO stages 0 and 1, and pipelines: a rank adds a block of lanes before any reduction over ranks.

    Autograd's gradients are taken parameter by parameter as they are accumulated, so this works inside torch's pipeline
    schedules, which run the backward passes of every stage in the order of the micro batches.

    Args:
        models: this rank's stages.
        data: the mesh of the data-parallel ranks, or of those of a copy, or None.
        copies: see `ShardedLanes`.
        embedding_group: see `ParallelContext`.
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

    def loss_divisor(self, share: float) -> float:
        return 1

    def before_backward(self, number: int, micro_batches: int) -> None:
        for model in self._models:
            set_gradient_sync(model, is_on=False)

    def after_backward(self, number: int) -> None:
        """The hooks have added the gradients."""

    def finish(self) -> None:
        for bucket in buckets(self._sums, lambda sums: 4 * prod(sums.parameter.shape)):
            totals = [sums.total(self._embedding_group) for sums in bucket]
            parameters = [sums.parameter for sums in bucket]
            if self._group is not None:
                totals = (
                    _scattered(parameters, totals, self._group) if self._is_sharded else _summed(totals, self._group)
                )
            if self._copies is not None:
                totals = _summed(totals, self._copies)
            _set_means(parameters, totals, self._lanes.micro_batches)


class _LaneSums:
    """The sums of a parameter's gradients: within the current lane, and of complete lanes.

    Args:
        parameter: its `grad` is set at the end of an iteration.
        length: the micro batches of a lane.
    """

    def __init__(self, parameter: nn.Parameter, length: int) -> None:
        self.parameter = parameter
        self.output: OutputGradient | None = None  # of a tied table, where this rank has both ends
        self.waits = False  # where another rank has the other end: lanes are added after those of both are
        self._length = length
        self._passes = 0
        self._lane: torch.Tensor | None = None
        self._waiting: list[torch.Tensor] = []
        self._sum = PairwiseSum[torch.Tensor](torch.Tensor.add_)

    def accumulate(self, unsharded: torch.Tensor) -> None:
        """Take the gradient of a micro batch from the parameter as the backward pass uses it."""
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
        """Return the sum of all lanes on this rank. A collective call of both ends of a tied table."""
        for lane in self._waiting:
            dist.all_reduce(lane, group=embedding_group)  # of two ranks, so there is but one order
            self._sum.push(lane)
        self._waiting = []
        return self._sum.take()


def keep_ends_apart(model: Model, lanes: Lanes) -> OutputGradient | None:
    """Let the output layer accumulate its gradient of a tied table apart.

    None if the model does not have both ends, or if a single function adds the two sums of a lane of a micro batch, or
    if the table is frozen.
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
    """Return every trainable parameter with its target of accumulation in a backward pass. Collective.

    The second is the same object for all iterations; without FSDP2 it is the parameter itself. FSDP2 modules are
    gathered singly, since a complete model may not fit into the memory of a rank.
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
    """Return the local gradient, summed over tensor-parallel ranks where each has it for its part of the input."""
    if is_dtensor(gradient) and is_dtensor(parameter):
        return local_of(gradient.redistribute(placements=parameter.placements))  # type: ignore[attr-defined]
    return gradient


def _taken(parameter: nn.Parameter) -> torch.Tensor:
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    return local_of(gradient)


def _add_all(first: list[torch.Tensor], second: list[torch.Tensor]) -> list[torch.Tensor]:
    torch._foreach_add_(first, second)
    return first


def _summed(gradients: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return the sums over ranks of equal parts of gradients. A collective call."""
    total = sum_all(_flatten_dense_tensors(gradients), group)  # type: ignore[no-untyped-call]
    return list(_unflatten_dense_tensors(total, gradients))  # type: ignore[no-untyped-call]


def _scattered(
    parameters: Sequence[nn.Parameter], gradients: list[torch.Tensor], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Return this rank's rows of the sums over ranks, as FSDP2 shards the parameters. A collective call."""
    ranks = dist.get_world_size(group)
    # Like FSDP2, cut rows as `torch.chunk` does, and pad every gradient to chunks of one size.
    chunks = torch._chunk_cat(gradients, 0, ranks)
    chunk = sum_scatter(chunks.flatten(), group)
    sizes = [-(-gradient.shape[0] // ranks) * prod(gradient.shape[1:]) for gradient in gradients]
    shapes = [local_of(parameter).shape for parameter in parameters]
    return [flat[: shape.numel()].view(shape) for flat, shape in zip(torch.split(chunk, sizes), shapes, strict=True)]


def _set_means(parameters: Sequence[nn.Parameter], totals: list[torch.Tensor], micro_batches: int) -> None:
    torch._foreach_div_(totals, micro_batches)
    for parameter, total in zip(parameters, totals, strict=True):
        parameter.grad = with_memory(parameter.detach(), total)
