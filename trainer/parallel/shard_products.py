"""Products of virtual tensor-parallel shards, whose gradients meet in the memory of one weight without a copy."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F

from reprise.live_tensors import is_dtensor
from trainer.parallel.shard_sums import is_operand, operand


class ShardWeight(NamedTuple):
    """A shard's part of a weight, as a tensor of its own; `number` is that of the part in `memory`."""

    tensor: torch.Tensor
    memory: GradientMemory | None
    number: int


class GradientMemory:
    """The gradient of a weight while the products of its parts compute theirs.

    Concatenated afterwards, the gradients of parts would take twice the memory, and at 124M a seventh of a step of 256
    tokens.

    Args:
        like: the weight on this rank.
        count: of the parts, along `dimension`.
    """

    def __init__(self, like: torch.Tensor, count: int, dimension: int) -> None:
        self._shape, self._dtype, self._device = like.shape, like.dtype, like.device
        self._size, self._dimension = like.shape[dimension] // count, dimension
        self._memory: torch.Tensor | None = None

    def place(self, number: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the memory of a part, if a product may write into it: as into a tensor of its own."""
        place = self._places()[number]
        return place if place.dtype == dtype and is_operand(place) else None

    def take(self, gradients: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the gradient with those of its parts, and forget it."""
        for place, gradient in zip(self._places(), gradients, strict=True):
            if place.data_ptr() != gradient.data_ptr():
                place.copy_(gradient)
        memory, self._memory = self._memory, None
        return cast(torch.Tensor, memory)

    def _places(self) -> tuple[torch.Tensor, ...]:
        if self._memory is None:
            self._memory = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return torch.split(self._memory, self._size, self._dimension)


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter cut over tensor-parallel ranks, or a parameter itself."""
    return cast(torch.Tensor, parameter.to_local()) if is_dtensor(parameter) else parameter  # type: ignore[attr-defined]


def parts_of(parameter: torch.Tensor, count: int, dimension: int, dtype: torch.dtype) -> list[ShardWeight]:
    """Return the parts of a parameter for each of this rank's shards, in a dtype."""
    local = local_part(parameter)
    if count == 1:
        return [ShardWeight(operand(local.to(dtype)), None, 0)]
    memory = GradientMemory(local, count, dimension)
    tensors = _Parts.apply(local, memory, count, dimension, dtype)  # type: ignore[no-untyped-call]
    return [ShardWeight(tensor, memory, number) for number, tensor in enumerate(tensors)]


def product(x: torch.Tensor, weight: ShardWeight, bias: torch.Tensor | None, *, is_transposed: bool) -> torch.Tensor:
    """Return x [..., in] times a weight [out, in], or [in, ...out] if transposed, as [..., out]."""
    return cast(torch.Tensor, _Product.apply(x, weight.tensor, bias, weight, is_transposed))  # type: ignore[no-untyped-call]


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, memory: GradientMemory, count: int, dimension: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        ctx.memory = memory
        parts = torch.split(local, local.shape[dimension] // count, dimension)
        return tuple(operand(part.to(dtype)) for part in parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.memory.take(gradients), None, None, None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        part: ShardWeight,
        is_transposed: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.memory, ctx.number, ctx.is_transposed, ctx.has_bias = (
            part.memory,
            part.number,
            is_transposed,
            bias is not None,
        )
        return F.linear(x, _as_rows(weight, is_transposed), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, inputs = gradient.flatten(0, -2), x.flatten(0, -2)
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = torch.mm(rows, _as_rows(weight, ctx.is_transposed)).view(x.shape)
        if ctx.needs_input_grad[1]:
            place = None if ctx.memory is None else ctx.memory.place(ctx.number, weight.dtype)
            factors = (inputs.t(), rows) if ctx.is_transposed else (rows.t(), inputs)
            of_weight = torch.mm(*factors, out=None if place is None else place.flatten(1)).view(weight.shape)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_x, of_weight, of_bias, None, None


def _as_rows(weight: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    return weight.flatten(1).t() if is_transposed else weight
