from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.harness import TINY, compose
from tests.messages import refused
from trainer.config.schema import Config
from trainer.data.batches import Samples
from trainer.data.loader import BatchLoader
from trainer.run.batch_loaders import micro_batches_of
from trainer.schedules.batch_size import BatchSchedule, parse_batch_schedule


@st.composite
def schedules(draw: st.DrawFn) -> BatchSchedule:
    borders = draw(st.lists(st.integers(1, 60), max_size=4))
    firsts = [0, *itertools.accumulate(borders)]
    return BatchSchedule(tuple((first, draw(st.integers(1, 9))) for first in firsts))


def test_a_text_is_read_with_its_suffixes() -> None:
    found = parse_batch_schedule("0:8  4k:16 1M:32")
    assert found.steps == ((0, 8), (4_000, 16), (1_000_000, 32))
    assert (str(found), found.sizes, found.last) == ("0:8 4000:16 1000000:32", (8, 16, 32), 32)
    assert parse_batch_schedule(str(found)) == found
    assert [found.at(consumed) for consumed in (0, 3_999, 4_000, 999_999, 10**9)] == [8, 8, 16, 16, 32]


@pytest.mark.parametrize(
    "text", ["", "4:8", "0:8 4000", "0:8 4K:16", "0:8 -1:16", "0:8 4k:16 4k:32", "0:8 8k:16 4k:32", "0:0"]
)
def test_a_text_that_is_no_schedule_is_refused(text: str) -> None:
    with refused(ValueError):
        parse_batch_schedule(text)


@given(schedules(), st.integers(0, 60))
def test_the_closed_forms_agree_with_counting(schedule: BatchSchedule, iterations: int) -> None:
    consumed = [0]
    for _ in range(iterations):
        consumed.append(consumed[-1] + schedule.at(consumed[-1]))
    assert schedule.consumed_after(iterations) == consumed[-1]
    for begun, first in enumerate(consumed):
        assert schedule.iterations(first, consumed[-1]) == iterations - begun
        assert schedule.iterations(first, consumed[-1] + schedule.at(consumed[-1]) - 1) == iterations - begun
    assert schedule.iterations(consumed[-1] + 1, consumed[-1]) == 0


class Positions(Samples):
    """Samples that are their own positions."""

    def __init__(self) -> None:
        pass

    def windows(self, ids: np.ndarray) -> np.ndarray:
        return ids[:, None]


class InOrder(BatchLoader):
    def sample_ids(self, counts: np.ndarray, seed: int) -> np.ndarray:
        return counts


@cache
def growing(pp: int) -> Config:
    sizes = ["train.batch_schedule=0:24 50:48 120:72 200:24 250:48", "train.global_batch_size=48"]
    return compose(["model=gpt2_tiny", *TINY, *sizes, f"parallel.pipeline_model_parallel_size={pp}"])


@given(st.lists(st.sampled_from([1, 2, 3, 6]), min_size=12, max_size=12), st.sampled_from([1, 2]))
def test_ranks_change_anywhere_and_every_sample_comes_once(ranks: list[int], pp: int) -> None:
    run = growing(pp)
    schedule, found = run.train.batch_sizes, list[int]()
    for dp in ranks:
        topology, consumed = run.parallel.topology(dp * pp), len(found)
        size = schedule.at(consumed)
        for rank in range(dp):
            numbers = micro_batches_of(run, topology, rank, max(schedule.sizes))
            loader = InOrder(Positions(), max(schedule.sizes), 2, numbers, torch.device("cpu"))
            batches = loader.train_batch(consumed, seed=0, size=size)
            assert len(loader.numbers_of(size)) == len(batches) == size // (2 * dp)
            found += torch.cat(batches).flatten().tolist()
        assert sorted(found) == list(range(consumed + size))
    assert len(found) == schedule.consumed_after(len(ranks))
