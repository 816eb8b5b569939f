"""Lanes hold every micro batch once, and their sums are added in one tree for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.parallel.lanes import Lanes, PairwiseSum, count_problems

POWERS = [1, 2, 4, 8, 16, 32, 64]
_powers = st.sampled_from(POWERS)


def tree(values: list[str]) -> str:
    """Return the balanced tree of the values in words."""
    while len(values) > 1:
        values = [f"({first}+{second})" for first, second in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def pairwise(values: list[str]) -> str:
    found = PairwiseSum[str](lambda first, second: f"({first}+{second})")
    for value in values:
        found.push(value)
    return found.take()


def numbered(count: int) -> list[str]:
    return [str(number) for number in range(count)]


@given(count=st.integers(1, 64))
def test_a_partial_sum_waits_for_each_bit_of_the_number(count: int) -> None:
    alive: list[str] = []

    def add(first: str, second: str) -> str:
        alive.remove(first)
        alive.remove(second)
        alive.append(f"({first}+{second})")
        return alive[-1]

    found = PairwiseSum[str](add)
    for value in numbered(count):
        alive.append(value)
        found.push(value)
    assert len(alive) == count.bit_count()
    if count in POWERS:
        assert [found.take()] == alive
    else:
        with pytest.raises(ValueError, match="unpack"):
            found.take()


@given(count=_powers, ranks=_powers, blocks=_powers, length=st.integers(1, 5))
def test_every_micro_batch_is_on_one_rank(count: int, ranks: int, blocks: int, length: int) -> None:
    count, blocks = max(count, ranks), min(blocks, ranks)
    lanes = Lanes(count, count * length)
    assert lanes.length == length
    shares = [lanes.micro_batches_of(rank, ranks, blocks=blocks) for rank in range(ranks)]
    assert {len(share) for share in shares} == {lanes.micro_batches // ranks}
    assert sorted(number for share in shares for number in share) == list(range(lanes.micro_batches))


def ranks_first_sum(lanes: Lanes, ranks: int) -> str:
    """Add every lane of all ranks over the ranks, then on a rank."""
    shares = [lanes.of_rank(rank, ranks, blocks=1) for rank in range(ranks)]
    return pairwise([tree([str(lane) for lane in at_once]) for at_once in zip(*shares, strict=True)])


def copies_last_sum(lanes: Lanes, ranks: int) -> str:
    """Add every lane of a copy over its ranks, then on a rank, then over two copies."""
    copies, members = min(2, ranks), ranks // min(2, ranks)
    shares = [lanes.of_rank(rank, ranks, blocks=copies) for rank in range(ranks)]
    halves = [shares[copy * members : (copy + 1) * members] for copy in range(copies)]
    return tree(
        [pairwise([tree([str(lane) for lane in at_once]) for at_once in zip(*half, strict=True)]) for half in halves]
    )


def ranks_last_sum(lanes: Lanes, ranks: int) -> str:
    """Add the lanes of each rank, then over the ranks."""
    shares = [lanes.of_rank(rank, ranks, blocks=ranks) for rank in range(ranks)]
    return tree([pairwise([str(lane) for lane in share]) for share in shares])


@pytest.mark.parametrize("add", [ranks_first_sum, copies_last_sum, ranks_last_sum])
@pytest.mark.parametrize(
    ("count", "ranks"), [(count, ranks) for count in POWERS[:6] for ranks in POWERS if ranks <= count]
)
def test_the_tree_is_the_same_on_every_number_of_ranks(
    add: Callable[[Lanes, int], str], count: int, ranks: int
) -> None:
    assert add(Lanes(count, count), ranks) == tree(numbered(count))


@given(count=st.integers(-8, 70), ranks=st.integers(1, 9), more=st.integers(1, 24))
def test_a_count_is_refused_unless_it_divides_and_is_divided(count: int, ranks: int, more: int) -> None:
    micro_batches = ranks * more
    is_power = count in POWERS
    is_possible = count == 0 or (is_power and micro_batches % count == 0 and count % ranks == 0)
    found = [*count_problems("key", count, {"micro-batches": micro_batches}, ("ranks", ranks))]
    assert len(found) == (0 if is_possible else 1)
    assert all(f"key={count}: must be 0" in problem and f"ranks={ranks}" in problem for problem in found)
