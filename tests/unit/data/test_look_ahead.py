"""What is found for iterations to come is what each would find alone."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.fakes import tokens_in_memory
from trainer.data.batches import OrderedSamples, Samples
from trainer.data.blend import Blend
from trainer.data.loader import BatchLoader
from trainer.data.look_ahead import Ints, LookAhead
from trainer.data.position_map import PositionMap


def source(count: int, first: int = 0) -> Samples:
    return Samples([tokens_in_memory(np.arange(first, first + count + 1, dtype=np.uint16))], seq_length=1)


BLENDED = OrderedSamples([source(31), source(47, 1000)], Blend([Fraction(2), Fraction(3)]))
KINDS = {
    "one source": OrderedSamples([source(1000)]),
    "blend": BLENDED,
    "begun later": replace(BLENDED, position=7, consumed=[4, 3]),
    "passed over": replace(BLENDED, position_map=PositionMap.of([(30, 40), (1020, 1030)])),
}


# Iterations, their size, the seed, and the samples to go back before. The phases cross the borders of epochs and of
# lookups, with a ramp, rewinds into a block, between its iterations and before it, and another seed.
PHASES = ((3, 24, 1, 0), (50, 48, 1, 72), (3, 48, 1, 1000), (3, 48, 1, 20), (3, 48, 1, 480), (2, 48, 2, 0))


def loader(samples: OrderedSamples) -> BatchLoader:
    return BatchLoader(samples, 48, 4, [1, 3, 5, 7, 9, 11], torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_iteration_has_the_batch_of_a_new_start(kind: str) -> None:
    goes_on, consumed = loader(KINDS[kind]), 7
    for count, size, seed, back in PHASES:
        consumed -= back
        for _ in range(count):
            found, alone = (each.train_batch(consumed, seed, size) for each in (goes_on, loader(KINDS[kind])))
            assert [batch.tolist() for batch in found] == [batch.tolist() for batch in alone]
            consumed += size


def test_the_order_is_asked_once_for_many_iterations() -> None:
    asked = list[int]()

    def order(positions: Ints, seed: int) -> Ints:
        asked.append(positions.size)
        return positions + seed

    ahead = LookAhead(order)
    for number in range(130):
        ids = ahead.ids(number * 16, 16, 5, lambda number=number: np.arange(number * 16, number * 16 + 8))
        assert ids.tolist() == [number * 16 + offset + 5 for offset in range(8)]
    assert asked == [1024, 1024]
    assert ahead.ids(0, 4096, 5, lambda: np.arange(4096)).size == asked.pop() == 4096
