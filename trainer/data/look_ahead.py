"""The samples of a rank's next iterations, in a lookup that costs about the same for one sample as for hundreds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_SAMPLES = 1024  # of a lookup; an iteration with more is looked up by itself


@dataclass(frozen=True, slots=True)
class _Block:
    """The samples `ids` [k, n] of k iterations of `size` samples over all ranks, the first after `first` samples."""

    first: int
    size: int
    seed: int
    ids: Ints

    def iteration(self, consumed: int, size: int, seed: int) -> Ints | None:
        number, rest = divmod(consumed - self.first, size)
        if (size, seed) != (self.size, self.seed) or rest or not 0 <= number < len(self.ids):
            return None
        ids: Ints = self.ids[number]
        return ids


class LookAhead:
    """Samples by iteration, a pure function of its arguments: what is kept never changes a result.

    Args:
        order: returns the samples at global positions [n] in the order of a seed.
    """

    __slots__ = ("_block", "_order")

    def __init__(self, order: Callable[[Ints, int], Ints]) -> None:
        self._order = order
        self._block: _Block | None = None

    def ids(self, consumed: int, size: int, seed: int, positions: Callable[[], Ints]) -> Ints:
        """Return the samples of an iteration of `size` samples after `consumed` samples, int64 [n].

        Args:
            positions: returns this rank's global positions in the iteration, int64 [n].
        """
        ids = None if self._block is None else self._block.iteration(consumed, size, seed)
        if ids is None:
            self._block = self._find(consumed, size, seed, positions())
            ids = self._block.ids[0]
        return ids

    def _find(self, consumed: int, size: int, seed: int, positions: Ints) -> _Block:
        iterations = max(1, _SAMPLES // max(1, positions.size))
        ahead = np.arange(iterations, dtype=np.int64)[:, None] * size + positions
        return _Block(consumed, size, seed, self._order(ahead.reshape(-1), seed).reshape(ahead.shape))
