"""Sums of float32 values, independent of the order of the values and of their ranks.

A sum is kept without rounding as a few float64 numbers, `parts`, which ranks exchange; `math.fsum` of the parts of all
ranks is the exact sum, rounded once. Source of the expansion: Shewchuk 1997, "Adaptive Precision Floating-Point
Arithmetic and Fast Robust Geometric Predicates".
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

# A sum of fewer than 2^29 float32 values lies between 2^-149 and 2^157; each part holds 53 bits of it.
PARTS = 6
_SIGNIFICAND_BITS = 24
_CHUNK = 1 << 18  # elements that are squared at a time, so that they stay in a core's cache


def parts(values: torch.Tensor) -> tuple[float, ...]:
    """Return `PARTS` numbers with the same exact sum as `values` [n], which are exact in float32."""
    numbers = values.detach().double().cpu().numpy()
    if not np.isfinite(numbers).all():
        return (sum(numbers.tolist()), *(0.0,) * (PARTS - 1))
    significands, exponents = np.frexp(numbers)
    lowest = int(exponents.min(initial=0))
    # Integers below 2^24: their sums by exponent are exact for 2^29 of them.
    sums = np.bincount(exponents - lowest, weights=np.ldexp(significands, _SIGNIFICAND_BITS))
    used = np.flatnonzero(sums)
    terms = np.ldexp(sums[used], used + lowest - _SIGNIFICAND_BITS).tolist()
    expansion: list[float] = []
    for _ in range(PARTS):
        expansion.append(math.fsum([*terms, *(-part for part in expansion)]))
    return tuple(expansion)


def total(parts_of_all: Iterable[float]) -> float:
    """Return the sum of the parts of all ranks, rounded once; nonfinite if a part is."""
    numbers = list(parts_of_all)
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)


def row_squares(gradient: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each row, float32 [rows], added in an order by the row's length alone.

    A library's reduction may choose another order for another number of rows. Here every addition is a kernel by
    element.

    Args:
        gradient: [rows, ...]; of one dimension, every element is a row.
    """
    table = gradient.reshape(gradient.shape[0], -1)
    at_once = max(1, _CHUNK // max(1, table.shape[1]))
    return torch.cat([_fold(block.square()) for block in torch.split(table, at_once)])


def _fold(squares: torch.Tensor) -> torch.Tensor:
    """Add the second half of the columns to the first until a single column is left."""
    columns = squares.shape[1]
    while columns > 1:
        half = (columns + 1) // 2  # of an odd number, the middle column waits for the next round
        squares[:, : columns - half] += squares[:, half:columns]
        columns = half
    return squares[:, 0]
