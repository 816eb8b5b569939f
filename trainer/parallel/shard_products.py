"""Products of virtual tensor-parallel shards, which write their gradients into one weight's memory without a copy."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch

from reprise.tensors import is_dtensor
from trainer.parallel.shard_sums import ALIGNMENT, is_operand, operand

# The fewest rows and columns in a matrix that products use in place. Kernels for vectors and narrow matrices add in
# another order at another stride. Those for larger ones copy a matrix's blocks before they multiply.
_LEAST = 64


class ShardWeight(NamedTuple):
    """A shard's part of a weight, as a separate tensor. `number` is the part's number in `memory`."""

    tensor: torch.Tensor
    memory: GradientMemory | None
    number: int


class GradientMemory:
    """A weight's gradient while its parts' products compute theirs.

    Concatenating the parts' gradients afterwards would double the memory, and at 124M parameters take a seventh of a
    step with 256 tokens.

    Args:
        like: The weight on this rank.
        count: The number of parts along `dimension`.
    """

    def __init__(self, like: torch.Tensor, count: int, dimension: int) -> None:
        self._shape, self._dtype, self._device = like.shape, like.dtype, like.device
        self._size, self._dimension = like.shape[dimension] // count, dimension
        self._memory: torch.Tensor | None = None

    def place(self, number: int, dtype: torch.dtype, tokens: int) -> torch.Tensor | None:
        """Return a part's memory, if a product over tokens gives the same bits there as in memory of its own."""
        place = self._places()[number]
        fits = is_operand(place) or (tokens >= _LEAST and is_factor(place))
        return place if place.dtype == dtype and fits else None

    def take(self, gradients: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the complete gradient, and drop its memory."""
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
    """Return this rank's part of a parameter cut over tensor-parallel ranks, or the parameter itself."""
    return cast(torch.Tensor, parameter.to_local()) if is_dtensor(parameter) else parameter  # type: ignore[attr-defined]


def parts_of(parameter: torch.Tensor, count: int, dimension: int, dtype: torch.dtype) -> list[ShardWeight]:
    """Return a parameter's parts for each shard on this rank, in a dtype."""
    local = local_part(parameter)
    if count == 1:
        return [ShardWeight(operand(local.to(dtype)), None, 0)]
    memory = GradientMemory(local, count, dimension)
    tensors = _Parts.apply(local, memory, count, dimension, dtype)  # type: ignore[no-untyped-call]
    return [ShardWeight(tensor, memory, number) for number, tensor in enumerate(tensors)]


def is_factor(tensor: torch.Tensor) -> bool:
    """Return whether a matrix part is large and aligned, so products with it have the same bits as with a copy."""
    if tensor.dim() != 2 or min(tensor.shape) < _LEAST or tensor.stride(1) != 1:
        return False
    pitch = tensor.stride(0) * tensor.element_size()
    return pitch % ALIGNMENT == 0 and tensor.data_ptr() % ALIGNMENT == 0


def product(
    x: torch.Tensor,
    weight: ShardWeight,
    bias: torch.Tensor | None,
    *,
    is_transposed: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x [..., in] times a weight [out, in], or [in, ...out] if transposed, as [..., out].

    Args:
        out: Memory for the result, in operand form.
    """
    return cast(torch.Tensor, _Product.apply(x, weight.tensor, bias, weight, is_transposed, out))  # type: ignore[no-untyped-call]


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, memory: GradientMemory, count: int, dimension: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        ctx.memory = memory
        parts = torch.split(local, local.shape[dimension] // count, dimension)
        return tuple(part if is_factor(part) else operand(part) for part in (part.to(dtype) for part in parts))

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
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        inputs = x.flatten(0, -2)
        if len(inputs) < _LEAST:
            weight = operand(weight)
        ctx.save_for_backward(x, weight)
        ctx.part, ctx.is_transposed = part, is_transposed
        columns = _as_rows(weight, is_transposed).t()
        # Not a view of the shards' shared memory: autograd would see it change.
        output = x.new_empty(*x.shape[:-1], columns.shape[1]) if out is None else out.data
        flat = output.flatten(0, -2)
        if bias is None:
            torch.mm(inputs, columns, out=flat)
        else:
            torch.addmm(bias, inputs, columns, out=flat)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, inputs = gradient.flatten(0, -2), x.flatten(0, -2)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.mm(rows, _as_rows(weight, ctx.is_transposed)).view(x.shape)
        if ctx.needs_input_grad[1]:
            place = None
            if ctx.part.memory is not None:
                place = ctx.part.memory.place(ctx.part.number, weight.dtype, len(rows))
            factors = (inputs.t(), rows) if ctx.is_transposed else (rows.t(), inputs)
            grad_weight = torch.mm(*factors, out=None if place is None else place.flatten(1)).view(weight.shape)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias, None, None, None


def _as_rows(weight: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    return weight.flatten(1).t() if is_transposed else weight
