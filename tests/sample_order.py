"""The order of samples written out a second time, a number at a time: `trainer.data.order` must agree with it.

Each epoch permutes range(epoch_size) with the generalized Feistel network of Black and Rogaway 2002, "Ciphers with
arbitrary finite domains", and cycle walking. Its keys are outputs of splitmix64.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_WORD = 2**64
_ROUNDS = 8


def permute(index: int, *, count: int, key: int) -> int:
    """Return the image of an index of range(count).

    The network permutes pairs of a left below `sides[0]` and a right below `sides[1]`; even rounds shift the left by a
    function of the right, odd rounds the right by a function of the left. What comes out at `count` or above goes
    through it again.
    """
    width = math.isqrt(count - 1) + 1
    sides = width, -(-count // width)
    keys = [_splitmix64(key, turn) for turn in range(_ROUNDS)]
    while True:
        pair = [index % width, index // width]
        for turn, round_key in enumerate(keys):
            moved, other = turn % 2, 1 - turn % 2
            pair[moved] = (pair[moved] + _mix(pair[other] + round_key) // 2) % sides[moved]
        index = pair[1] * width + pair[0]
        if index < count:
            return index


def sample_ids(first: int, count: int, *, epoch_size: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the samples at the global positions `first` to `first + count - 1`, as int64 of shape [count]."""
    found = []
    for position in range(first, first + count):
        epoch, index = divmod(position, epoch_size)
        found.append(permute(index, count=epoch_size, key=_splitmix64(_mix(seed), epoch)))
    return np.array(found, dtype=np.int64)


def _splitmix64(seed: int, number: int) -> int:
    """Return an output of the generator with this seed; the first has number 0."""
    return _mix(seed + (number + 1) * 0x9E3779B97F4A7C15)


def _mix(value: int) -> int:
    """Return the 64 bits that splitmix64 makes of its state."""
    value %= _WORD
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % _WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB % _WORD
    return value ^ value >> 31
