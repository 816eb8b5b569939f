"""Faults of samples by their positions in the order: the number of a sample carries its position through a loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trainer.data.batches import Samples
from trainer.data.data_file import Ints
from trainer.data.loader import BatchLoader


def methods_with(change: Callable[[Ints, Ints], Ints]) -> Mapping[tuple[type, str], Callable[..., Any]]:
    """Return methods by their class and name, for a single source without evaluation.

    Args:
        change: returns in place of windows [n, seq_length + 1] at positions [n] others.
    """
    order, read = BatchLoader.sample_ids, Samples.windows

    def sample_ids(loader: BatchLoader, counts: Ints, seed: int) -> Ints:
        return loader.position_map.positions(counts) * loader.samples.count + order(loader, counts, seed)

    def windows(samples: Samples, numbers: Ints) -> Ints:
        positions, ids = np.divmod(numbers, samples.count)
        return change(read(samples, ids), positions)

    return {(BatchLoader, "sample_ids"): sample_ids, (Samples, "windows"): windows}
