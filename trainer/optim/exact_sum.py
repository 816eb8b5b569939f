"""Sums of floating-point values without rounding, independent of their order and ranks.

A sum is stored as the digits of a whole number, its limbs. Limbs are int64 and add exactly over ranks in any order, so
ranks need only a single reduction of fixed size on their device. `value` rounds the total once. Numbers lie between
2^-298, the last bit of a squared float32, and 2^310.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

_LIMB_BITS = 32  # int64 limbs allow sums over 2^31 ranks
_LIMBS = 19
_LOWEST = -298
# After the limbs: how many numbers were infinity, minus infinity, NaN.
COLUMNS = _LIMBS + 3
# float32 exponents, as `torch.frexp` returns them, from -148 to 128.
_BINS, _BIN_OF_0 = 277, 148
_SIGNIFICAND_BITS = 24
_CHUNK = 1 << 18  # elements squared at a time, to stay in a core's cache
_SMALL = 1 << 14  # tables up to this many elements are squared together


@dataclass(frozen=True, slots=True)
class NormShare:
    """A rank's parameter in the gradient norm.

    Args:
        index: This rank's number among the ranks with the same rows.
        count: The number of these ranks.
        shards: This rank's virtual tensor-parallel shards, 0 without any. Their parts of a row are summed separately,
            because at another topology each may be on its own rank.
        dimension: The dimension in which the shards cut the parameter.
    """

    parameter: nn.Parameter
    index: int
    count: int
    shards: int = 0
    dimension: int = 0


def limbs(numbers: torch.Tensor) -> torch.Tensor:
    """Return each number's limbs, int64 [n, COLUMNS] on their device.

    Args:
        numbers: float64 [n], each a multiple of 2^-298 below 2^310, or not finite.
    """
    multiples = numbers.nan_to_num(0.0, 0.0, 0.0).unsqueeze(1) * _scales(numbers.device)
    return torch.cat([_digits(multiples).long(), _kinds(numbers)], dim=1)


def sum_limbs(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the limbs of each vector's sum, int64 [k, COLUMNS] on their device.

    Args:
        vectors: k tensors [n], with fewer than 2^29 values each, exact in float32.
    """
    significands, exponents = torch.frexp(torch.cat([vector.float() for vector in vectors]).nan_to_num(0.0, 0.0, 0.0))
    bins = exponents.long()
    for number, part in enumerate(torch.split(bins, [vector.numel() for vector in vectors])):
        part += number * _BINS + _BIN_OF_0
    # Whole numbers below 2^24, so their sums by exponent are exact.
    wholes = significands.mul_(2.0**_SIGNIFICAND_BITS).long()
    sums = wholes.new_zeros(len(vectors) * _BINS).index_add_(0, bins, wholes).view(len(vectors), _BINS, 1)
    digits = _digits(sums * _bin_scales(sums.device)).sum(1)  # below 2^41, exact
    kinds = _kinds(torch.stack([vector.sum(dtype=torch.float64) for vector in vectors]))
    return torch.cat([digits.long(), kinds], dim=1)


def _digits(multiples: torch.Tensor) -> torch.Tensor:
    """Return finite numbers' signed digits, whole numbers in float64 [..., _LIMBS].

    Args:
        multiples: float64 [..., _LIMBS + 1], each number times the factors of `_scales`.
    """
    # Powers of two scale without rounding. The difference is a whole number below 2^32, and exact like both terms.
    multiples.trunc_()
    return torch.sub(multiples[..., :-1], multiples[..., 1:], alpha=1 << _LIMB_BITS)


def _kinds(numbers: torch.Tensor) -> torch.Tensor:
    """Return whether each number is infinity, minus infinity, or NaN, int64 [n, 3]."""
    column = numbers.unsqueeze(1)
    return torch.cat([column == _infinities(numbers.device), column != column], dim=1).long()


def value(sums: Sequence[int]) -> float:
    """Return the number given by `COLUMNS` limb sums, rounded once. Not finite if any summand was not."""
    positive, negative, nan = sums[_LIMBS:]
    if nan or (positive and negative):
        return float("nan")
    if positive or negative:
        return float("inf") if positive else -float("inf")
    number = 0
    for limb in reversed(sums[:_LIMBS]):
        number = (number << _LIMB_BITS) + limb
    return number / (1 << -_LOWEST)


def rounded_once(numbers: Sequence[float]) -> float:
    """Return the sum of a process's numbers, with the bits of `value`."""
    try:
        return math.fsum(numbers)
    except ValueError:  # of infinity and minus infinity
        return math.nan


@functools.cache
def _scales(device: torch.device) -> torch.Tensor:
    """Return the factors scaling each limb's unit, and the unit of a limb above them, to 1."""
    scales = [2.0 ** -(_LOWEST + _LIMB_BITS * number) for number in range(_LIMBS + 1)]
    return torch.tensor(scales, dtype=torch.float64, device=device)


@functools.cache
def _infinities(device: torch.device) -> torch.Tensor:
    return torch.tensor([float("inf"), -float("inf")], dtype=torch.float64, device=device)


@functools.cache
def _bin_scales(device: torch.device) -> torch.Tensor:
    """Return the factors of `_scales` times each bin's unit, float64 [_BINS, _LIMBS + 1]."""
    units = [2.0 ** (number - _BIN_OF_0 - _SIGNIFICAND_BITS) for number in range(_BINS)]
    return torch.tensor(units, dtype=torch.float64, device=device).unsqueeze(1) * _scales(device)


def row_squares(tables: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return each row's sum of squares, float32, over tables [rows, columns], in no given order of rows.

    The order of a row's additions depends only on its length. A library reduction may change it with the row count.
    Here every addition is an elementwise kernel.
    """
    sums, small = list[torch.Tensor](), dict[int, list[torch.Tensor]]()
    for table in tables:
        if table.numel() <= _SMALL:  # a call costs more than a copy
            small.setdefault(table.shape[1], []).append(table)
            continue
        rows = max(1, _CHUNK // table.shape[1])
        sums.append(torch.cat([_fold(part.square()) for part in torch.split(table, rows)]))  # copies views of squares
    return sums + [_fold(torch.cat(group).square_()) for group in small.values()]


def _fold(squares: torch.Tensor) -> torch.Tensor:
    """Add the second half of the columns to the first until a single column is left. A middle column waits."""
    while squares.shape[1] > 1:
        first, second = squares.chunk(2, dim=1)
        first.narrow(1, 0, second.shape[1]).add_(second)
        squares = first
    return squares[:, 0]
