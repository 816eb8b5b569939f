"""Distributes an iteration's micro-batches over lanes, whose gradients are added in a fixed binary tree. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Lanes:
    """An iteration's lanes. Lane l holds micro-batches l * length to (l + 1) * length - 1, added in order.

    Lane sums are added in a balanced binary tree: (0 + 1), (2 + 3), then pairs, and so on. A rank adds its own lanes,
    and ranks add the upper levels, so the tree is the same for any number of data-parallel ranks dividing `count`.

    Args:
        count: The lane count, a power of two. Also the largest number of data-parallel ranks.
        micro_batches: The micro-batch count in an iteration over all ranks, a multiple of `count`.
    """

    count: int
    micro_batches: int

    @property
    def length(self) -> int:
        """Return the micro-batch count per lane."""
        return self.micro_batches // self.count

    def of_rank(self, rank: int, ranks: int, *, blocks: int) -> list[int]:
        """Return a data-parallel rank's lanes, in order.

        Args:
            blocks: The number of blocks. Each has contiguous lanes and an equal number of ranks. The lowest tree levels
                within a block are sums over its ranks, so neighboring ranks have neighboring lanes. With one block per
                rank, each rank adds its own lanes before it sends anything.
        """
        size, members = self.count // blocks, ranks // blocks
        block, place = divmod(rank, members)
        return list(range(block * size + place, (block + 1) * size, members))

    def micro_batches_of(self, rank: int, ranks: int, *, blocks: int) -> list[int]:
        """Return the numbers of a rank's micro-batches within the iteration, lane by lane."""
        lanes = self.of_rank(rank, ranks, blocks=blocks)
        return [lane * self.length + number for lane in lanes for number in range(self.length)]


class PairwiseSum(Generic[_Value]):
    """Adds values in a balanced binary tree as they arrive. It holds a partial sum per bit of their count.

    Args:
        add: Returns the sum of two values. It may reuse either value's memory.
    """

    def __init__(self, add: Callable[[_Value, _Value], _Value]) -> None:
        self._add = add
        self._count = 0
        self._partial: list[_Value] = []

    def push(self, value: _Value) -> None:
        """Add the next value."""
        count = self._count
        while count & 1:  # a partial sum over as many values as `value` is waiting
            value = self._add(self._partial.pop(), value)
            count >>= 1
        self._partial.append(value)
        self._count += 1

    def take(self) -> _Value:
        """Return the sum of all values and start over. Their count must be a power of two."""
        (total,) = self._partial
        self._count, self._partial = 0, []
        return total


def count_problems(key: str, count: int, sizes: Mapping[str, int], ranks: tuple[str, int]) -> Iterator[str]:
    """Explain why a key that keeps bits equal over ranks cannot have a value.

    Args:
        sizes: The sizes that the value must divide, by name.
        ranks: The name and number of the ranks, of which the value must be a multiple.
    """
    is_power = count > 0 and count & (count - 1) == 0
    name, least = ranks
    if count and not (is_power and count % least == 0 and all(size % count == 0 for size in sizes.values())):
        divided = ", ".join(f"{size_name}={size}" for size_name, size in sizes.items())
        yield (
            f"{key}={count}: must be 0 (off), or a power of two that divides {divided} and is a multiple of "
            f"{name}={least}"
        )
