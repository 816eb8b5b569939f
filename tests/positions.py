"""Faults of samples by their positions in the order: the number of a sample carries its position through a loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trainer.data.batches import OrderedSamples
from trainer.data.data_file import Ints


def methods_with(change: Callable[[Ints, Ints], Ints]) -> Mapping[str, Callable[..., Any]]:
    """Return methods of `OrderedSamples` by name, for a single source without evaluation.

    Args:
        change: returns in place of windows [n, seq_length + 1] at positions [n] others.
    """
    order, read = OrderedSamples.sample_ids, OrderedSamples.windows

    def sample_ids(samples: OrderedSamples, counts: Ints, seed: int) -> Ints:
        return samples.position_map.positions(counts) * samples.count + order(samples, counts, seed)

    def windows(samples: OrderedSamples, numbers: Ints) -> Ints:
        positions, ids = np.divmod(numbers, samples.count)
        return change(read(samples, ids), positions)

    return {"sample_ids": sample_ids, "windows": windows}
