"""The order of samples: a permutation an epoch, a function of seed and position alone, the same in every version."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sample_order import permute, sample_ids

keys = st.integers(-(2**70), 2**70)
seeds = st.integers(0, 2**64 - 1)


@settings(deadline=None, max_examples=300)
@given(count=st.integers(1, 5000), key=keys)
def test_permute_is_a_bijection(count: int, key: int) -> None:
    image = permute(np.arange(count), count=count, key=key)
    assert image.dtype == np.int64
    assert np.array_equal(np.sort(image), np.arange(count))


@pytest.mark.parametrize("count", range(1, 131))
def test_permute_is_a_bijection_of_every_small_range(count: int) -> None:
    for key in range(5):
        assert sorted(permute(np.arange(count), count=count, key=key).tolist()) == list(range(count))


@settings(deadline=None)
@given(count=st.integers(1, 2**62), key=keys, data=st.data())
def test_permute_is_injective_and_stays_in_huge_ranges(count: int, key: int, data: st.DataObject) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=50, unique=True)), dtype=np.int64)
    image = permute(index, count=count, key=key)
    assert np.unique(image).size == index.size
    assert np.all((image >= 0) & (image < count))


@settings(deadline=None)
@given(count=st.integers(1, 3000), key=keys)
def test_permute_is_pointwise(count: int, key: int) -> None:
    index = np.arange(count)
    whole = permute(index, count=count, key=key)
    assert np.array_equal(permute(index[::-3], count=count, key=key), whole[::-3])
    assert permute(np.array([[count - 1]]), count=count, key=key).tolist() == [[whole[-1]]]
    assert np.array_equal(index, np.arange(count))


@pytest.mark.parametrize("index", [[-1], [5], [0, 7]])
def test_permute_refuses_an_index_outside_its_range(index: list[int]) -> None:
    with pytest.raises(IndexError, match=r"range\(5\)"):
        permute(np.array(index), count=5, key=0)


def test_permutations_of_a_small_range_are_about_equally_likely() -> None:
    seen = Counter(tuple(permute(np.arange(4), count=4, key=key).tolist()) for key in range(24 * 250))
    # 250 expected, standard deviation 15.5; the keys are fixed, so the outcome is too.
    assert len(seen) == 24
    assert 180 < min(seen.values()) <= max(seen.values()) < 320


def test_neighbours_do_not_stay_together() -> None:
    count = 100_000
    image = permute(np.arange(count), count=count, key=1)
    # Standard error of a correlation of independent values: 1 / sqrt(count) = 0.003.
    assert abs(np.corrcoef(image, np.arange(count))[0, 1]) < 0.015
    assert abs(np.corrcoef(image[1:], image[:-1])[0, 1]) < 0.015


@settings(deadline=None)
@given(epoch_size=st.integers(1, 2000), epoch=st.integers(0, 2**40), seed=seeds)
def test_every_sample_comes_once_an_epoch(epoch_size: int, epoch: int, seed: int) -> None:
    ids = sample_ids(epoch * epoch_size, epoch_size, epoch_size=epoch_size, seed=seed)
    assert np.array_equal(np.sort(ids), np.arange(epoch_size))


@settings(deadline=None)
@given(
    epoch_size=st.integers(1, 60),
    first=st.integers(0, 10**9),
    cuts=st.lists(st.integers(0, 90), max_size=8),
    seed=seeds,
)
def test_the_order_does_not_depend_on_how_positions_are_cut(
    epoch_size: int, first: int, cuts: list[int], seed: int
) -> None:
    whole = sample_ids(first, sum(cuts), epoch_size=epoch_size, seed=seed)
    position, parts = first, []
    for length in cuts:
        parts += sample_ids(position, length, epoch_size=epoch_size, seed=seed).tolist()
        position += length
    assert whole.tolist() == parts


@settings(deadline=None)
@given(seed=seeds, other=seeds, epoch=st.integers(0, 10**6), later=st.integers(1, 10**6))
def test_epochs_and_seeds_have_orders_of_their_own(seed: int, other: int, epoch: int, later: int) -> None:
    # 100 samples have 9e157 orders: two that agree by chance are not met.
    ids = sample_ids(epoch * 100, 100, epoch_size=100, seed=seed).tolist()
    assert ids != sample_ids((epoch + later) * 100, 100, epoch_size=100, seed=seed).tolist()
    assert seed == other or ids != sample_ids(epoch * 100, 100, epoch_size=100, seed=other).tolist()


def test_seeds_an_increment_apart_do_not_share_epochs() -> None:
    step = 0x9E3779B97F4A7C15
    assert (
        sample_ids(100, 100, epoch_size=100, seed=0).tolist() != sample_ids(0, 100, epoch_size=100, seed=step).tolist()
    )


@pytest.mark.parametrize(("first", "count", "epoch_size"), [(-1, 1, 5), (0, -1, 5), (0, 1, 0)])
def test_impossible_positions_are_refused(first: int, count: int, epoch_size: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        sample_ids(first, count, epoch_size=epoch_size, seed=0)


def test_the_order_is_the_same_in_every_version() -> None:
    assert permute(np.arange(10), count=10, key=0).tolist() == [3, 4, 2, 9, 7, 0, 1, 5, 8, 6]
    ends = np.array([0, 1, 10**12 - 1])
    assert permute(ends, count=10**12, key=-1).tolist() == [829522231316, 996450502978, 848463725897]
    assert sample_ids(5, 10, epoch_size=7, seed=1234).tolist() == [4, 6, 1, 3, 4, 5, 6, 2, 0, 5]


def test_a_million_positions_take_less_than_a_second() -> None:
    # Processor time, and the best of three, so that a busy machine does not decide.
    times_s = []
    for _ in range(3):
        begin_s = time.process_time()
        sample_ids(12_345, 10**6, epoch_size=700_001, seed=1)
        times_s.append(time.process_time() - begin_s)
    assert min(times_s) < 1.0
