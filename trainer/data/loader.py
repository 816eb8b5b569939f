"""This rank's micro batches as tensors on its device: a function of the samples consumed, with no iterator to save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from trainer.data.batches import OrderedSamples, micro_batch_positions
from trainer.data.look_ahead import Ints, LookAhead
from trainer.data.position_map import PositionMap


@dataclass(frozen=True, slots=True)
class BatchLoader:
    """Windows of token files for a data-parallel coordinate.

    Args:
        global_batch_size, micro_batch_size: in samples; iterations of training may be smaller.
        numbers: this coordinate's micro batches, by their numbers in an iteration over all coordinates; a smaller
            iteration has the first of them.
    """

    samples: OrderedSamples
    global_batch_size: int
    micro_batch_size: int
    numbers: Sequence[int]
    device: torch.device
    _ahead: LookAhead = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ahead", LookAhead(self.samples.sample_ids))

    def starting_at(self, position: int, consumed: Sequence[int]) -> BatchLoader:
        """Return the loader whose sources go on, from a global position, after samples of each were consumed."""
        return replace(self, samples=replace(self.samples, position=position, consumed=consumed))

    def mapped(self, position_map: PositionMap) -> BatchLoader:
        """Return the loader with other samples passed over."""
        return replace(self, samples=replace(self.samples, position_map=position_map))

    def numbers_of(self, size: int) -> Sequence[int]:
        """Return the numbers of this coordinate's micro batches in an iteration of `size` samples."""
        if size == self.global_batch_size:
            return self.numbers
        return [number for number in self.numbers if number < size // self.micro_batch_size]

    def train_batch(self, consumed_samples: int, seed: int, size: int | None = None) -> list[torch.Tensor]:
        """Return the micro batches of the iteration after `consumed_samples`, int64 [b, seq_length + 1].

        Args:
            size: samples of the iteration, over all coordinates; by default as many as there can be.
        """
        size = size or self.global_batch_size
        ids = self._ahead.ids(consumed_samples, size, seed, lambda: self._train_positions(consumed_samples, size))
        return list(torch.split(to_device(self.samples.windows(ids), self.device), self.micro_batch_size))

    def _train_positions(self, consumed_samples: int, size: int) -> Ints:
        return np.concatenate([*self._positions(consumed_samples, self.numbers_of(size))])

    def eval_batches(self, global_batches: int) -> Iterator[list[torch.Tensor]]:
        """Yield the micro batches of each of the first global batches in data order, cycling."""
        for batch in range(global_batches):
            for_batch = self._positions(batch * self.global_batch_size, self.numbers)
            yield [to_device(self.samples.windows(ids % self.samples.count), self.device) for ids in for_batch]

    def _positions(self, consumed_samples: int, numbers: Sequence[int]) -> Iterator[Ints]:
        for number in numbers:
            positions = micro_batch_positions(consumed_samples, number=number, micro_batch_size=self.micro_batch_size)
            yield np.asarray(positions, dtype=np.int64)


def to_device(windows: Ints, device: torch.device) -> torch.Tensor:
    """Return windows on a device. The host does not wait: torch keeps the pinned memory until the copy has finished."""
    tensor = torch.from_numpy(windows)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
