"""The order of samples: a pure function of seed and global position, so a resume needs one integer.

Invariant: the values never change between versions, or every run in flight would see samples twice.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

# splitmix64: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"; the constants are those of
# Vigna's public-domain splitmix64.c.
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK_64 = 2**64 - 1

_ROUNDS = 8
# Small enough for the temporaries of a round to stay in the cache of a core.
_BLOCK = 2**15


def permute(index: npt.NDArray[np.int64], *, count: int, key: int) -> npt.NDArray[np.int64]:
    """Map each index through the permutation of range(count) that belongs to ``key``, without building it.

    The permutation is the generalized Feistel network of Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains", on ``a * b >= count`` with ``a = ceil(sqrt(count))``; results of ``count`` or above go through it again
    (cycle walking, same paper), which at most ``a - 1`` values of the domain need.

    Args:
        index: any shape, values in range(count).
        count: at least 1.
        key: any integer; taken modulo 2**64.

    Returns:
        int64, the shape of ``index``.

    Raises:
        ValueError: ``count`` is not positive.
        IndexError: an index is outside range(count).
    """
    if count < 1:
        raise ValueError(f"expected a positive count, found {count}")
    if index.size and (int(index.min()) < 0 or int(index.max()) >= count):
        raise IndexError(f"expected indices in range({count}), found {int(index.min())} to {int(index.max())}")
    flat = index.reshape(-1)
    out = np.empty(flat.shape, dtype=np.int64)
    keys = _round_keys(key)
    for start in range(0, flat.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        out[block] = _walk(flat[block].astype(np.uint64), keys, count)
    return out.reshape(index.shape)


def sample_ids(first: int, count: int, *, epoch_size: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the samples at the global positions ``first`` to ``first + count - 1``.

    Position p lies in epoch ``p // epoch_size``; every epoch has its own permutation of range(epoch_size), so each
    sample comes exactly once an epoch however the positions are cut into calls.

    Returns:
        int64 of shape [count], values in range(epoch_size).

    Raises:
        ValueError: ``first`` or ``count`` is negative, or ``epoch_size`` is not positive.
    """
    if first < 0 or count < 0:
        raise ValueError(f"expected positions that are not negative, found first {first} and count {count}")
    if epoch_size < 1:
        raise ValueError(f"expected a positive epoch size, found {epoch_size}")
    out = np.empty(count, dtype=np.int64)
    done = 0
    while done < count:
        epoch, offset = divmod(first + done, epoch_size)
        length = min(count - done, epoch_size - offset)
        index = np.arange(offset, offset + length, dtype=np.int64)
        out[done : done + length] = permute(index, count=epoch_size, key=_epoch_key(seed, epoch))
        done += length
    return out


def _walk(values: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.uint64]:
    a = math.isqrt(count - 1) + 1
    b = -(-count // a)
    values = _feistel(values, keys, np.uint64(a), np.uint64(b))
    outside = np.flatnonzero(values >= count)
    while outside.size:
        again = _feistel(values[outside], keys, np.uint64(a), np.uint64(b))
        values[outside] = again
        outside = outside[again >= count]
    return values


def _feistel(
    values: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64], a: np.uint64, b: np.uint64
) -> npt.NDArray[np.uint64]:
    """Permute range(a * b): left is taken modulo a and right modulo b, the roles change every round."""
    right, left = np.divmod(values, a)
    for turn, key in enumerate(keys):
        # One bit less, so that the sum cannot wrap: a wrap would let two values of left meet.
        shift = _mix(right + key) >> np.uint64(1)
        left, right = right, (left + shift) % (a if turn % 2 == 0 else b)
    # After an even number of rounds left is again below a and right below b.
    return right * a + left


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finalizer of splitmix64 to an array, in place."""
    values ^= values >> np.uint64(30)
    values *= _MIX_1
    values ^= values >> np.uint64(27)
    values *= _MIX_2
    values ^= values >> np.uint64(31)
    return values


def _round_keys(key: int) -> npt.NDArray[np.uint64]:
    """Return the first outputs of splitmix64 seeded with ``key``."""
    return _mix(np.array([(key + turn * _GAMMA) & _MASK_64 for turn in range(1, _ROUNDS + 1)], dtype=np.uint64))


def _epoch_key(seed: int, epoch: int) -> int:
    """Return output number ``epoch`` of splitmix64 seeded with a scrambled ``seed``.

    Without the scrambling, seeds that differ by a multiple of the increment would share epochs.
    """
    start = int(_mix(np.array([seed & _MASK_64], dtype=np.uint64))[0])
    return int(_mix(np.array([(start + (epoch + 1) * _GAMMA) & _MASK_64], dtype=np.uint64))[0])
