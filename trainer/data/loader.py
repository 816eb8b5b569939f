"""This rank's micro batches as tensors on its device: a function of the samples consumed, with no iterator to save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer.data.batches import Samples, micro_batch_positions
from trainer.data.order import sample_ids


@dataclass(frozen=True, slots=True)
class BatchLoader:
    """Windows of token files for one data-parallel coordinate.

    Args:
        global_batch_size, micro_batch_size: in samples; iterations of training may be smaller.
        numbers: this coordinate's micro batches, by their numbers in an iteration over all coordinates; a smaller
            iteration has the first of them.
    """

    samples: Samples
    global_batch_size: int
    micro_batch_size: int
    numbers: Sequence[int]
    device: torch.device

    def numbers_of(self, size: int) -> Sequence[int]:
        """Return the numbers of this coordinate's micro batches in an iteration of `size` samples."""
        return self.numbers[: len(self.numbers) * size // self.global_batch_size]

    def train_batch(self, consumed_samples: int, seed: int, size: int | None = None) -> list[torch.Tensor]:
        """Return the micro batches of the iteration that begins at `consumed_samples`, int64 [b, seq_length + 1].

        Args:
            size: samples of the iteration, over all coordinates; by default as many as there can be.
        """
        return [
            self._windows(sample_ids(p.start, len(p), epoch_size=self.samples.count, seed=seed))
            for p in self._positions(consumed_samples, self.numbers_of(size or self.global_batch_size))
        ]

    def eval_batches(self, global_batches: int) -> Iterator[list[torch.Tensor]]:
        """Yield the micro batches of each of the first global batches in data order, cycling."""
        for batch in range(global_batches):
            positions = self._positions(batch * self.global_batch_size, self.numbers)
            yield [self._windows(np.asarray(p, dtype=np.int64) % self.samples.count) for p in positions]

    def _positions(self, consumed_samples: int, numbers: Sequence[int]) -> Iterator[range]:
        for number in numbers:
            yield micro_batch_positions(consumed_samples, number=number, micro_batch_size=self.micro_batch_size)

    def _windows(self, ids: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(self.samples.windows(ids)).to(self.device)
