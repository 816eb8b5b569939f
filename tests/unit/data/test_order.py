"""The order of samples: a permutation an epoch, a function of seed and position alone, the same in every version."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import sample_order
from tests.profiles import examples
from trainer.data.order import sample_ids_at

seeds = st.integers(-(2**70), 2**70)


def sample_ids(first: int, count: int, *, epoch_size: int, seed: int) -> npt.NDArray[np.int64]:
    return sample_ids_at(np.arange(first, first + count), epoch_sizes=np.full(count, epoch_size), seed=seed)


@examples(300)
@given(epoch_size=st.integers(1, 130) | st.integers(1, 5000), epoch=st.integers(0, 2**40), seed=seeds)
def test_every_sample_comes_once_an_epoch(epoch_size: int, epoch: int, seed: int) -> None:
    ids = sample_ids(epoch * epoch_size, epoch_size, epoch_size=epoch_size, seed=seed)
    assert ids.dtype == np.int64
    assert np.array_equal(np.sort(ids), np.arange(epoch_size))


# Each range stands for those of its number of bits; the positions reach over the border of two epochs.
@examples(500)
@given(
    sizes=st.lists(st.integers(0, 55).flatmap(lambda bits: st.integers(1, 2**bits + 1)), min_size=1, max_size=3),
    epoch=st.integers(0, 60),
    seed=seeds,
)
def test_any_part_of_the_order_is_the_one_written_out(sizes: list[int], epoch: int, seed: int) -> None:
    first = max(0, epoch * sizes[0] - 10)
    epoch_sizes = np.resize(np.array(sizes), 30)
    together = sample_ids_at(np.arange(first, first + 30), epoch_sizes=epoch_sizes, seed=seed)
    alone = {size: sample_order.sample_ids(first, 30, epoch_size=size, seed=seed) for size in sizes}
    assert together.tolist() == [alone[size][number] for number, size in enumerate(epoch_sizes.tolist())]


@pytest.mark.parametrize(("position", "epoch_size"), [(-1, 5), (0, 0), (0, -1)])
def test_impossible_positions_are_refused(position: int, epoch_size: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        sample_ids(position, 1, epoch_size=epoch_size, seed=0)


def test_the_order_is_the_same_in_every_version() -> None:
    assert [sample_order.permute(n, count=10, key=0) for n in range(10)] == [3, 4, 2, 9, 7, 0, 1, 5, 8, 6]
    ends = [sample_order.permute(n, count=10**12, key=-1) for n in (0, 1, 10**12 - 1)]
    assert ends == [829522231316, 996450502978, 848463725897]
    assert sample_ids(5, 10, epoch_size=7, seed=1234).tolist() == [4, 6, 1, 3, 4, 5, 6, 2, 0, 5]


@pytest.mark.slow
def test_a_million_positions_take_less_than_a_second() -> None:
    # Processor time, and the best of three, so that a busy machine does not decide.
    times_s = []
    for _ in range(3):
        begin_s = time.process_time()
        sample_ids(12_345, 10**6, epoch_size=700_001, seed=1)
        times_s.append(time.process_time() - begin_s)
    assert min(times_s) < 1.0
