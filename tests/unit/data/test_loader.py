"""Micro batches as a function of the samples consumed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
import torch

from tests.fakes import tokens_in_memory
from tests.sample_order import sample_ids
from trainer.data.batches import OrderedSamples, Samples
from trainer.data.blend import Blend
from trainer.data.loader import BatchLoader
from trainer.data.position_map import PositionMap

SEQ_LENGTH = 4


@pytest.fixture
def samples() -> OrderedSamples:
    """Return 30 samples whose first tokens are their numbers times 4."""
    tokens = np.arange(30 * SEQ_LENGTH + 1, dtype=np.uint16)
    return OrderedSamples([Samples([tokens_in_memory(tokens)], seq_length=SEQ_LENGTH)])


def feeds(samples: OrderedSamples, *, ranks: int, micro_batch_size: int = 2) -> list[BatchLoader]:
    count = 12 // micro_batch_size
    dealt = [range(rank, count, ranks) for rank in range(ranks)]
    return [BatchLoader(samples, 12, micro_batch_size, numbers, torch.device("cpu")) for numbers in dealt]


def read(found: list[list[torch.Tensor]]) -> list[int]:
    """Return the sample numbers of one iteration in order of micro batch, then rank."""
    return [int(window[0]) // SEQ_LENGTH for batches in zip(*found, strict=True) for b in batches for window in b]


@pytest.mark.parametrize(("ranks", "micro_batch_size"), [(1, 2), (2, 2), (3, 2), (2, 3), (1, 12), (6, 1)])
def test_all_ranks_together_read_the_samples_of_the_order(
    samples: OrderedSamples, ranks: int, micro_batch_size: int
) -> None:
    for consumed in (0, 12, 24, 36):  # the third crosses an epoch of 30
        group = feeds(samples, ranks=ranks, micro_batch_size=micro_batch_size)
        found = [feed.train_batch(consumed, 7) for feed in group]
        assert {len(batches) for batches in found} == {12 // (ranks * micro_batch_size)}
        for batch in itertools.chain(*found):
            assert (batch.shape, batch.dtype) == ((micro_batch_size, SEQ_LENGTH + 1), torch.int64)
            assert torch.equal(batch[:, 1:], batch[:, :-1] + 1)
        assert read(found) == sample_ids(consumed, 12, epoch_size=30, seed=7).tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_evaluation_reads_from_the_start_in_order_and_wraps(samples: OrderedSamples, ranks: int) -> None:
    found = [list(itertools.chain(*feed.eval_batches(3))) for feed in feeds(samples, ranks=ranks)]
    assert read(found) == [number % 30 for number in range(36)]


def source(count: int, first: int = 0) -> Samples:
    return Samples([tokens_in_memory(np.arange(first, first + count + 1, dtype=np.uint16))], seq_length=1)


BLENDED = OrderedSamples([source(31), source(47, 1000)], Blend([Fraction(2), Fraction(3)]))
KINDS = {
    "one source": OrderedSamples([source(1000)]),
    "blend": BLENDED,
    "begun later": replace(BLENDED, position=7, consumed=[4, 3]),
    "passed over": replace(BLENDED, position_map=PositionMap.of([(30, 40), (1020, 1030)])),
}


def test_the_order_is_asked_once_for_many_iterations() -> None:
    loader = BatchLoader(KINDS["one source"], 16, 8, [1], torch.device("cpu"))
    with mock.patch.object(OrderedSamples, "sample_ids", autospec=True, side_effect=OrderedSamples.sample_ids) as order:
        for number in range(130):
            loader.train_batch(number * 16, 5)
            assert len(loader._ahead) == 128
        replace(loader, global_batch_size=4096, numbers=range(512)).train_batch(0, 5)
    assert [call.args[1].size for call in order.call_args_list] == [1024, 1024, 4096]
