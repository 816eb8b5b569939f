"""This rank's micro batches as tensors on its device: a function of the samples consumed, with no iterator to save."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from trainer.data.batches import Samples, global_batch_positions
from trainer.data.order import sample_ids


@dataclass(frozen=True, slots=True)
class BatchLoader:
    """Windows of token files for one data-parallel coordinate.

    Args:
        global_batch_size, micro_batch_size: in samples; `dp_size` micro batches, one per rank, follow each other.
    """

    samples: Samples
    global_batch_size: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int
    device: torch.device

    @property
    def micro_batches(self) -> int:
        """Return how many micro batches this rank has per iteration."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    def train_batch(self, consumed_samples: int, seed: int) -> list[torch.Tensor]:
        """Return the micro batches of the iteration that begins at `consumed_samples`, int64 [b, seq_length + 1]."""
        return [
            self._windows(sample_ids(p.start, len(p), epoch_size=self.samples.count, seed=seed))
            for p in (self._positions(consumed_samples, number) for number in range(self.micro_batches))
        ]

    def eval_batches(self, global_batches: int) -> Iterator[list[torch.Tensor]]:
        """Yield the micro batches of each of the first global batches in data order, cycling."""
        for batch in range(global_batches):
            positions = (self._positions(batch * self.global_batch_size, n) for n in range(self.micro_batches))
            yield [self._windows(np.asarray(p, dtype=np.int64) % self.samples.count) for p in positions]

    def _positions(self, consumed_samples: int, number: int) -> range:
        return global_batch_positions(
            consumed_samples,
            micro_batch=number,
            data_parallel_rank=self.dp_rank,
            data_parallel_size=self.dp_size,
            micro_batch_size=self.micro_batch_size,
        )

    def _windows(self, ids: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(self.samples.windows(ids)).to(self.device)
