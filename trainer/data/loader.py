"""Loads this rank's micro-batches to its device: a function of consumed samples, without an iterator state to save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch

from trainer.data.batches import Samples
from trainer.data.blend import Blend
from trainer.data.data_file import Ints
from trainer.data.order import sample_ids_at
from trainer.data.position_map import PositionMap

_SAMPLES = 1024  # per lookup, which takes as long for 1 sample; an iteration with more is looked up alone
_ALONE, _NO_GAPS = Blend([Fraction(1)]), PositionMap()


@dataclass(frozen=True, slots=True)
class BatchLoader:
    """Token file windows for a data-parallel rank, from weighted sources, each with its own order and epochs.

    Args:
        samples: The samples in as many sources as in `blend`.
        global_batch_size: Largest global batch size, in samples. Training iterations may be smaller.
        micro_batch_size: Samples per micro-batch.
        numbers: This rank's micro-batches, numbered in an iteration over all data-parallel ranks. A smaller iteration
            has the first of them.
        position: The global position where the blend starts.
        consumed: Samples consumed before from each source. Zeros by default.
        position_map: The positions for the run's sample counts, with the skipped ones left out.
    """

    samples: Samples
    global_batch_size: int
    micro_batch_size: int
    numbers: Sequence[int]
    device: torch.device
    blend: Blend = _ALONE
    position: int = 0
    consumed: Sequence[int] | None = None
    position_map: PositionMap = _NO_GAPS
    # The next iterations' samples, by consumed samples, size and seed.
    _ahead: dict[tuple[int, int, int], Ints] = field(init=False, compare=False, repr=False, default_factory=dict)

    def numbers_of(self, size: int) -> Sequence[int]:
        """Return the numbers of this rank's micro-batches in an iteration with `size` samples."""
        return [number for number in self.numbers if number < size // self.micro_batch_size]

    def train_batch(self, consumed_samples: int, seed: int, size: int) -> list[torch.Tensor]:
        """Return the micro-batches for the iteration after `consumed_samples`, int64 [b, seq_length + 1].

        Args:
            size: Samples in the iteration, over all data-parallel ranks.
        """
        key = consumed_samples, size, seed
        if key not in self._ahead:
            positions = self._positions(consumed_samples, size)
            starts = consumed_samples + np.arange(max(1, _SAMPLES // max(1, positions.size))) * size
            ahead = np.add.outer(starts - consumed_samples, positions)
            ids = self.sample_ids(ahead.ravel(), seed).reshape(ahead.shape)
            self._ahead.clear()
            self._ahead.update({(start, size, seed): row for start, row in zip(starts.tolist(), ids, strict=True)})
        return self._micro_batches(self._ahead[key])

    def sample_ids(self, counts: Ints, seed: int) -> Ints:
        """Return the sample ids for counts from 0, int64 [n]. Ids number the samples through all sources."""
        sources, index = self.blend.locate(self.position_map.positions(counts) - self.position)
        if self.consumed is not None:
            index = index + np.array(self.consumed, np.int64)[sources]
        bounds: Ints = self.samples.source_bounds
        return bounds[sources] + sample_ids_at(index, epoch_sizes=np.diff(bounds)[sources], seed=seed)

    def eval_batches(self, global_batches: int) -> Iterator[list[torch.Tensor]]:
        """Yield the micro-batches for each global batch in data order, from the first, cycling."""
        size = self.global_batch_size
        for batch in range(global_batches):
            yield self._micro_batches(self._positions(batch * size, size) % self.samples.count)

    def _positions(self, consumed_samples: int, size: int) -> Ints:
        """Return the global positions of this rank's samples in an iteration."""
        starts = consumed_samples + np.array(self.numbers_of(size), np.int64) * self.micro_batch_size
        return np.add.outer(starts, np.arange(self.micro_batch_size)).ravel()

    def _micro_batches(self, ids: Ints) -> list[torch.Tensor]:
        windows = self.samples.windows(ids)
        return [*to_device(windows.reshape(-1, self.micro_batch_size, windows.shape[1]), self.device).unbind()]


def to_device(windows: Ints, device: torch.device) -> torch.Tensor:
    """Copy windows to a device. The host does not wait: torch keeps the pinned memory until the copy has finished."""
    tensor = torch.from_numpy(windows)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
