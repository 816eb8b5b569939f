"""The sample order: a pure function of seed and global position, so a resume needs a single integer.

Invariant: values never change between versions, or every running job would see samples twice.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from trainer.data.data_file import Ints

_Words: TypeAlias = npt.NDArray[np.uint64]

# splitmix64: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"; the constants come
# from Vigna's public-domain splitmix64.c.
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK_64 = 2**64 - 1

_ROUNDS = 8


def sample_ids_at(positions: Ints, *, epoch_sizes: Ints, seed: int) -> Ints:
    """Return the samples at global positions, each in an order for its own epoch size.

    Position p lies in epoch ``p // epoch_size``. Every epoch has its own permutation of range(epoch_size), so each
    sample comes exactly once per epoch, whatever calls the positions are split into.

    Args:
        positions: Shape [n], not negative.
        epoch_sizes: Shape [n], at least 1, with few distinct values.

    Returns:
        int64 [n], each below its epoch size.
    """
    epochs, index = np.divmod(positions, epoch_sizes)
    keys = _epoch_keys(seed, epochs)
    sizes, which = np.unique(epoch_sizes, return_inverse=True)
    sides = np.array([_sides(size) for size in sizes.tolist()], dtype=np.uint64).reshape(-1, 2)[which]
    a, b = sides.T
    ids = _walk(index.astype(np.uint64), _round_keys(keys), epoch_sizes.astype(np.uint64), a, b)
    return ids.astype(np.int64)


def _sides(count: int) -> tuple[int, int]:
    """Return the permutation domain's sides for range(count). Their product is at least `count`."""
    a = math.isqrt(count - 1) + 1
    return a, -(-count // a)


def _walk(values: _Words, keys: _Words, counts: _Words, a: _Words, b: _Words) -> _Words:
    """Permute values [n], each in range(its count). Keys are [rounds, n], the other arguments [n].

    The permutation is the generalized Feistel network from Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains", on ``a * b >= count`` with ``a = ceil(sqrt(count))``. Results at or above ``count`` go through it again
    (cycle walking, same paper), which at most ``a - 1`` values in the domain need.
    """
    values = _feistel(values, keys, a, b)
    outside = np.flatnonzero(values >= counts)
    while outside.size:
        again = _feistel(values[outside], keys[:, outside], a[outside], b[outside])
        values[outside] = again
        outside = outside[again >= counts[outside]]
    return values


def _feistel(values: _Words, keys: _Words, a: _Words, b: _Words) -> _Words:
    """Permute range(a * b): left is taken modulo a and right modulo b, with roles swapping every round."""
    right, left = np.divmod(values, a)
    for turn, key in enumerate(keys):
        # One bit less, to keep the sum from wrapping: a wrap could map two left values to the same result.
        shift = _mix(right + key) >> np.uint64(1)
        left, right = right, (left + shift) % (a if turn % 2 == 0 else b)
    # After an even number of rounds left is again below a and right below b.
    return right * a + left


def _mix(values: _Words) -> _Words:
    """Apply splitmix64's finalizer to an array, in place."""
    values ^= values >> np.uint64(30)
    values *= _MIX_1
    values ^= values >> np.uint64(27)
    values *= _MIX_2
    values ^= values >> np.uint64(31)
    return values


def _round_keys(keys: _Words) -> _Words:
    """Return splitmix64's first outputs for each seed in keys [...], as [rounds, ...]."""
    turns = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(_GAMMA)
    return _mix(np.add.outer(turns, keys))


def _epoch_keys(seed: int, epochs: Ints) -> _Words:
    """Return splitmix64's output for each epoch [...], seeded with a scrambled ``seed``.

    Without scrambling, seeds differing by a multiple of the increment would share epochs.
    """
    start = _mix(np.array(seed & _MASK_64, dtype=np.uint64).reshape(1))[0]
    return _mix((epochs.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA) + start)
