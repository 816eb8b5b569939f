"""Micro batches as a function of the samples consumed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from tests.fakes import tokens_in_memory
from trainer.data.batches import Samples
from trainer.data.loader import BatchLoader

SEQ_LENGTH = 4


@pytest.fixture
def samples() -> Samples:
    """Return 30 samples whose first tokens are their numbers times 4."""
    tokens = np.arange(30 * SEQ_LENGTH + 1, dtype=np.uint16)
    return Samples([tokens_in_memory(tokens)], seq_length=SEQ_LENGTH)


def feeds(samples: Samples, *, ranks: int, micro_batch_size: int = 2) -> list[BatchLoader]:
    count = 12 // micro_batch_size
    dealt = [range(rank, count, ranks) for rank in range(ranks)]
    return [BatchLoader(samples, 12, micro_batch_size, numbers, torch.device("cpu")) for numbers in dealt]


def read(found: list[list[torch.Tensor]]) -> list[int]:
    """Return the sample numbers of one iteration in order of micro batch, then rank."""
    return [int(window[0]) // SEQ_LENGTH for batches in zip(*found, strict=True) for b in batches for window in b]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_evaluation_reads_from_the_start_in_order_and_wraps(samples: Samples, ranks: int) -> None:
    found = [list(itertools.chain(*feed.eval_batches(3))) for feed in feeds(samples, ranks=ranks)]
    assert read(found) == [number % 30 for number in range(36)]


def test_the_order_is_asked_once_for_many_iterations() -> None:
    samples = Samples([tokens_in_memory(np.arange(1001, dtype=np.uint16))], seq_length=1)
    loader = BatchLoader(samples, 16, 8, [1], torch.device("cpu"))
    with mock.patch.object(BatchLoader, "sample_ids", autospec=True, side_effect=BatchLoader.sample_ids) as order:
        for number in range(130):
            loader.train_batch(number * 16, 5, 16)
            assert len(loader._ahead) == 128
        replace(loader, global_batch_size=4096, numbers=range(512)).train_batch(0, 5, 4096)
    assert [call.args[1].size for call in order.call_args_list] == [1024, 1024, 4096]
