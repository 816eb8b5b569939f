"""The order of samples: a permutation an epoch, a function of seed and position alone, the same in every version."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests import sample_order
from tests.profiles import examples
from trainer.data.order import sample_ids_at


# Each range stands for those of its number of bits; the positions reach over the border of two epochs.
@examples(500)
@given(
    sizes=st.lists(st.integers(0, 55).flatmap(lambda bits: st.integers(1, 2**bits + 1)), min_size=1, max_size=3),
    epoch=st.integers(0, 60) | st.integers(0, 2**40),
    seed=st.integers(-(2**70), 2**70),
)
def test_any_part_of_the_order_is_the_one_written_out(sizes: list[int], epoch: int, seed: int) -> None:
    first = max(0, epoch * sizes[0] % 2**62 - 10)
    epoch_sizes = np.resize(np.array(sizes), 30)
    together = sample_ids_at(np.arange(first, first + 30), epoch_sizes=epoch_sizes, seed=seed)
    assert together.dtype == np.int64
    alone = {size: sample_order.sample_ids(first, 30, epoch_size=size, seed=seed) for size in sizes}
    assert together.tolist() == [alone[size][number] for number, size in enumerate(epoch_sizes.tolist())]


def test_the_order_is_the_same_in_every_version() -> None:
    assert [sample_order.permute(n, count=10, key=0) for n in range(10)] == [3, 4, 2, 9, 7, 0, 1, 5, 8, 6]
    ends = [sample_order.permute(n, count=10**12, key=-1) for n in (0, 1, 10**12 - 1)]
    assert ends == [829522231316, 996450502978, 848463725897]
    ids = sample_ids_at(np.arange(5, 15), epoch_sizes=np.full(10, 7), seed=1234)
    assert ids.tolist() == [4, 6, 1, 3, 4, 5, 6, 2, 0, 5]
