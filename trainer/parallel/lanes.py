"""Deals the micro batches of an iteration into lanes, whose gradients are added in a fixed binary tree. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes of an iteration: lane l holds micro batches l * length to (l + 1) * length, added in order.

    The sums of the lanes are added as a balanced binary tree: (0 + 1), (2 + 3), then the pairs, and so on. A rank adds
    its lanes, and ranks add the rest, so the tree is the same for every number of data-parallel ranks that divides
    `count`.

    Args:
        count: a power of two; the largest number of data-parallel ranks.
        micro_batches: in an iteration, over all ranks; a multiple of `count`.
    """

    count: int
    micro_batches: int

    @property
    def length(self) -> int:
        """Return how many micro batches a lane has."""
        return self.micro_batches // self.count

    def of_rank(self, rank: int, ranks: int, *, blocks: int) -> list[int]:
        """Return the lanes of a data-parallel rank, in order.

        Args:
            blocks: of contiguous lanes, each of as many ranks. The lowest levels of the tree within a block are sums
                over its ranks, so neighbors have neighboring lanes. With a block for each rank, a rank adds its own
                before anything is sent.
        """
        size, members = self.count // blocks, ranks // blocks
        block, place = divmod(rank, members)
        return list(range(block * size + place, (block + 1) * size, members))

    def micro_batches_of(self, rank: int, ranks: int, *, blocks: int) -> list[int]:
        """Return the numbers in the iteration of a rank's micro batches, lane by lane."""
        lanes = self.of_rank(rank, ranks, blocks=blocks)
        return [lane * self.length + number for lane in lanes for number in range(self.length)]


class PairwiseSum(Generic[_Value]):
    """Adds values in a balanced binary tree as they come; it holds a partial sum per bit of their number.

    Args:
        add: returns the sum of two values; it may reuse the memory of either.
    """

    def __init__(self, add: Callable[[_Value, _Value], _Value]) -> None:
        self._add = add
        self._count = 0
        self._partial: list[_Value] = []

    def push(self, value: _Value) -> None:
        """Add the next value."""
        count = self._count
        while count & 1:  # a sum of as many values as `value` now stands for is waiting
            value = self._add(self._partial.pop(), value)
            count >>= 1
        self._partial.append(value)
        self._count += 1

    def take(self) -> _Value:
        """Return the sum of all values, whose number is a power of two, and start over."""
        (total,) = self._partial
        self._count, self._partial = 0, []
        return total


def invariant_ranks_problems(count: int, *, ranks: int, micro_batches: int) -> list[str]:
    """Return the problems of `parallel.invariant_ranks=count`, with the possible numbers.

    Args:
        ranks: the data-parallel ranks.
        micro_batches: in an iteration, over all ranks.
    """
    powers = [1 << power for power in range(micro_batches.bit_length()) if micro_batches % (1 << power) == 0]
    counts = [power for power in powers if power % ranks == 0]
    if count in (0, *counts):
        return []
    divided = f"the {micro_batches} micro batches of an iteration (train.global_batch_size / train.micro_batch_size)"
    if counts:
        rule = f"0 is off, the others are powers of two that divide {divided} and are multiples of the"
        return [f"parallel.invariant_ranks={count}: must be {listed([0, *counts])}: {rule} {ranks} data-parallel ranks"]
    rule = f"ranks that divide it can have a power of two that divides {divided}: {listed(powers)}"
    return [f"parallel.invariant_ranks={count}: must be 0 (off) on {ranks} data-parallel ranks; {rule}"]


def listed(numbers: list[int]) -> str:
    """Return numbers as "1, 2 or 4"."""
    return " or ".join(", ".join(map(str, numbers)).rsplit(", ", 1))
