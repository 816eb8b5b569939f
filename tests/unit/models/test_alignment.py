"""The layers have the same bits wherever their operands lie in memory, as long as every address is a multiple of 64.

Matrix products with a vector do not keep their bits at other addresses, so the parameters of a run with
`parallel.invariant_ranks` have the alignment of all memory that torch allocates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers import (
    Conv1D,
    FusedConv1D,
    LayerNorm,
    Linear,
    OutputLayer,
    RMSNorm,
    causal_attention,
    token_loss,
)

Operation: TypeAlias = Callable[..., Tensor]
TOKENS = torch.tensor([[3, 0, 3]])


def layer(make: Callable[[], torch.nn.Module]) -> Operation:
    """Return a layer as a function of its input and its parameters."""
    with torch.device("meta"):
        module = make()
    names = [name for name, _ in module.named_parameters()]
    return lambda x, *weights: torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x,))


def adapter(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return the product of an adapter."""
    return F.linear(F.linear(x, first.to(x.dtype)), second.to(x.dtype).flatten(0, -2))


def cases(rows: int, width: int, out: int) -> dict[str, tuple[Operation, list[tuple[int, ...]]]]:
    """Return every kind of layer with the shapes of its input and parameters."""
    x = (rows, width)
    return {
        "linear": (layer(lambda: Linear(width, out)), [x, (out, width)]),
        "conv1d": (layer(lambda: Conv1D(width, out)), [x, (width, out), (out,)]),
        "fused": (layer(lambda: FusedConv1D(width, 3, out)), [x, (width, 3, out), (3, out)]),
        "output": (layer(lambda: OutputLayer(width, out, out)), [x, (out, width)]),
        "padded output": (layer(lambda: OutputLayer(width, out + 3, out)), [x, (out + 3, width)]),
        "layer norm": (layer(lambda: LayerNorm(width, 1e-5)), [x, (width,), (width,)]),
        "rms norm": (layer(lambda: RMSNorm(width, 1e-5)), [x, (width,)]),
        "embedding": (lambda table: F.embedding(TOKENS, table), [(out + 4, width)]),
        "tied": (lambda table: F.linear(F.embedding(TOKENS, table), table), [(out + 4, width)]),
        "adapter of rank 1": (adapter, [x, (1, width), (3, out, 1)]),
        "adapter of rank 3": (adapter, [x, (3, width), (out, 3)]),
        "attention": (lambda q, k, v: causal_attention(q, k, v, None), [(1, rows, 2, width)] * 3),
        "loss": (lambda logits: token_loss(logits, torch.zeros(1, rows, dtype=torch.long)), [(1, rows, out)]),
    }


def at(values: Tensor, nbytes: int) -> Tensor:
    """Return a copy whose address is that many bytes behind the begin of a page."""
    memory = torch.empty(values.nbytes + 3 * 4096, dtype=torch.uint8)
    begin = -memory.data_ptr() % 4096 + nbytes
    return memory[begin : begin + values.nbytes].view(values.dtype).view(values.shape).copy_(values)


def bits(operation: Operation, operands: Iterable[Tensor], gradient: Tensor | None) -> list[bytes]:
    """Return the bits of the result and of the gradient of every operand."""
    leaves = [operand.detach().requires_grad_() for operand in operands]
    result = operation(*leaves)
    result.backward(gradient)  # type: ignore[no-untyped-call]
    parts = [result, *(leaf.grad for leaf in leaves)]
    return [part.detach().float().numpy().tobytes() for part in parts if part is not None]


SIZES = [(rows, width, out) for rows in (1, 2, 6) for width in (1, 6, 9, 10) for out in (1, 5, 7, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", cases(1, 1, 1))
def test_a_layer_has_its_bits_at_every_multiple_of_64(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in SIZES:
        operation, shapes = cases(*size)[name]
        operands = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        shape = operation(*operands).shape
        gradient = torch.randn(shape, generator=generator).to(dtype) if shape else None
        everything = operands if gradient is None else [*operands, gradient]
        expected = bits(operation, operands, gradient)
        for begin in (0, 64, 128, 1984, 4032):
            moved = [at(values, begin) for values in everything]
            moved_gradient = None if gradient is None else moved[-1]
            assert bits(operation, moved[: len(operands)], moved_gradient) == expected, (size, begin)
