"""Sums over virtual tensor-parallel shards, in the same binary tree for every rank count.

A rank has a contiguous block of shards. It adds these first, then ranks add, the nearest first: the tree is ((0 + 1) +
(2 + 3)) + ... wherever the rank boundaries lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from trainer.parallel.halving import sum_all, sum_scatter

_SEQUENCE = 1  # the dimension of [batch, sequence, width] divided into token blocks
ALIGNMENT = 64  # bytes; torch's alignment for CPU memory


@dataclass(frozen=True, slots=True)
class Shards:
    """All virtual shards in tensor parallelism, and this rank's.

    Args:
        count: The number of all shards, a power of two and a multiple of the rank count.
        group: The tensor-parallel process group. None for a single rank.
        is_sequence_parallel: Whether activations between the cut products are sharded over ranks along the sequence.
    """

    count: int
    group: dist.ProcessGroup | None = None
    is_sequence_parallel: bool = False

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def share(self) -> int:
        """Return the number of shards per rank."""
        return self.count // self.ranks

    @property
    def first(self) -> int:
        """Return this rank's first shard number."""
        return 0 if self.group is None else dist.get_rank(self.group) * self.share

    @property
    def first_block(self) -> int:
        """Return this rank's first token block number."""
        return self.first if self.is_sequence_parallel else 0

    def fork(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return all tokens' hidden states [B, T, width] for each shard on this rank.

        Gradients are added in the tree. A collective call: forward with sequence parallelism, backward with several
        ranks.
        """
        return cast(tuple[torch.Tensor, ...], _Fork.apply(x, self))  # type: ignore[no-untyped-call]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum over all shards of partial products [B, T, width]. A collective call with several ranks."""
        return cast(torch.Tensor, _Join.apply(self, *parts))  # type: ignore[no-untyped-call]

    def copies(
        self, weights: Sequence[torch.Tensor], count: int, *, over_ranks: bool
    ) -> list[tuple[torch.Tensor, ...]]:
        """Return `count` copies of uncut weights, whose gradients are added in the tree.

        Args:
            over_ranks: Whether other ranks have further copies, whose gradients are added too.
        """
        flat = _Copies.apply(self, count, over_ranks, *weights)  # type: ignore[no-untyped-call]
        return [flat[number * len(weights) : (number + 1) * len(weights)] for number in range(count)]

    def tokens(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return this rank's token blocks of `x` [B, T, ...]. `count` equal blocks divide the sequence."""
        length = x.shape[_SEQUENCE] * (self.ranks if self.is_sequence_parallel else 1)
        return [operand(block) for block in torch.split(x, max(1, -(-length // self.count)), _SEQUENCE)]

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens, given hidden states [B, T, width] for all tokens. A collective call backward."""
        return cast(torch.Tensor, _Scatter.apply(x, self))  # type: ignore[no-untyped-call]

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' tokens. A collective call."""
        assert self.group is not None
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.ranks)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, _SEQUENCE)

    def total(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum over all shards on every rank. A collective call with several ranks."""
        local = tree_sum(values)
        if self.group is None:
            return local
        flat = local.reshape(-1)
        # `sum_all` overwrites its argument.
        return sum_all(flat if len(values) > 1 else flat.clone(), self.group).view(local.shape)

    def scattered_total(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return this rank's tokens of the sum over all shards. A collective call."""
        assert self.group is not None
        local = tree_sum(values)
        chunks = torch.stack(local.chunk(self.ranks, _SEQUENCE))
        return sum_scatter(chunks.view(-1), self.group).view(chunks.shape[1:])


def tree_sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ((0 + 1) + (2 + 3)) + ... A value without a partner waits for the next level."""
    level = list(values)
    while len(level) > 1:
        pairs = [level[number : number + 2] for number in range(0, len(level), 2)]
        level = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0]


def operand(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a copy of it, in operand form: contiguous and aligned, like a newly allocated tensor.

    A kernel may add in another order at another address or stride.
    """
    return tensor if is_operand(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def is_operand(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is contiguous and aligned, see `operand`."""
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def join_tokens(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate token blocks [B, t, width]. Each block gets its gradient as a separate tensor."""
    return blocks[0] if len(blocks) == 1 else cast(torch.Tensor, _JoinTokens.apply(*blocks))  # type: ignore[no-untyped-call]


def aligned_stack(count: int, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return memory [count, *shape] with the dtype and device of `like`. Each part is in operand form."""
    size = math.prod(shape)
    pitch = size + -size % (ALIGNMENT // like.element_size())
    return like.new_empty(count, pitch)[:, :size].view(count, *shape)


def stacked(parts: Sequence[torch.Tensor], memory: torch.Tensor) -> torch.Tensor:
    """Return the shards' tensors as the memory that holds them, with gradients, see `aligned_stack`."""
    return cast(torch.Tensor, _Stack.apply(memory, *parts))  # type: ignore[no-untyped-call]


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shards: Shards) -> tuple[torch.Tensor, ...]:
        ctx.shards = shards
        hidden = shards.gathered(x) if shards.is_sequence_parallel else operand(x)
        return tuple(hidden.view_as(hidden) for _ in range(shards.share))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        shards: Shards = ctx.shards
        return (shards.scattered_total if shards.is_sequence_parallel else shards.total)(gradients), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shards: Shards, *parts: torch.Tensor) -> torch.Tensor:
        ctx.shards = shards
        if len(parts) == 1 and shards.group is None:
            return parts[0].view_as(parts[0])
        return (shards.scattered_total if shards.is_sequence_parallel else shards.total)(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        shards: Shards = ctx.shards
        hidden = shards.gathered(gradient) if shards.is_sequence_parallel else operand(gradient)
        return (None, *(hidden.view_as(hidden) for _ in range(shards.share)))


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shards: Shards, count: int, over_ranks: bool, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.shards, ctx.count, ctx.over_ranks = shards, count, over_ranks
        return tuple(weight.view_as(weight) for _ in range(count) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        shards: Shards = ctx.shards
        size = len(gradients) // ctx.count
        totals = [tree_sum(gradients[number::size]) for number in range(size)]
        if ctx.over_ranks and shards.group is not None:
            flat = sum_all(torch.cat([total.flatten() for total in totals]), shards.group)
            parts = torch.split(flat, [total.numel() for total in totals])
            totals = [part.view(total.shape) for part, total in zip(parts, totals, strict=True)]
        return (None, None, None, *totals)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shards: Shards) -> torch.Tensor:
        ctx.shards = shards
        return x.chunk(shards.ranks, _SEQUENCE)[shards.first // shards.share].clone(
            memory_format=torch.contiguous_format
        )

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.shards.gathered(gradient), None


class _JoinTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *blocks: torch.Tensor) -> torch.Tensor:
        ctx.sizes = [block.shape[_SEQUENCE] for block in blocks]
        return torch.cat(blocks, _SEQUENCE)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(operand(block) for block in torch.split(gradient, ctx.sizes, _SEQUENCE))


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, memory: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        assert all(part.data_ptr() == place.data_ptr() for part, place in zip(parts, memory, strict=True))
        return memory.view_as(memory)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *map(operand, gradient.unbind())
