"""The seconds of each rank's own work, by which the log names the slowest rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from trainer.launch.process_group import Cluster

# The slowest rank has a line of the log from this multiple of the mean on.
_NOTABLE = 1.1
_RANK_BITS = 24
_LONGEST = (1 << (63 - _RANK_BITS)) - 1  # microseconds, six days


class RankTime(NamedTuple):
    """Microseconds in which a rank waits for no other: in all, for a mean share of the batch, and those of its data."""

    total: int
    data: int


class OwnTime:
    """Measures this rank's own work since the last line of the log, without waits for other ranks.

    On an accelerator the work is measured by events of its stream. The host never waits for them: work that the stream
    has not ended counts for the next line.

    Attributes:
        load: this rank's micro batches of the iteration divided by their mean over ranks.
        last_load_s: seconds of the last block that loaded data.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self.load = 1.0
        self._events: list[tuple[Any, Any, float]] = []
        self._seconds = self._data_seconds = self.last_load_s = 0.0

    @contextmanager
    def working(self, load: float = 1.0) -> Iterator[None]:
        """Count the block, or its work on an accelerator, divided by `load`."""
        if self._module is None:
            start = time.perf_counter()
            yield
            self._seconds += (time.perf_counter() - start) / load
            return
        self._collect()
        begin, end = (self._module.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._events.append((begin, end, load))

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Count the block, which loads the data of the iteration, as the host's time."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._seconds += seconds / self.load
        self._data_seconds += seconds
        self.last_load_s = seconds

    def take(self) -> RankTime:
        """Return the times since the last call."""
        self._collect()
        times = RankTime(round(self._seconds * 1e6), round(self._data_seconds * 1e6))
        self._seconds, self._data_seconds = 0.0, 0.0
        return times

    def _collect(self) -> None:
        """Add the times of the events that the stream has passed."""
        while self._events and self._events[0][1].query():
            begin, end, load = self._events.pop(0)
            self._seconds += begin.elapsed_time(end) / 1e3 / load


@dataclass(frozen=True, slots=True)
class SlowestRank:
    """The rank with the longest own work since the last line of the log.

    Args:
        ratio: its time beside the mean of all ranks.
        data_seconds: its time of loading data.
    """

    rank: int
    ratio: float
    data_seconds: float

    def __str__(self) -> str:
        return f"slowest rank {self.rank}: {self.ratio:.2f} x mean (data {self.data_seconds:.1f} s)"


def ranked(own: RankTime, rank: int) -> int:
    """Return the number of a rank whose maximum over ranks, in an int64, names the slowest and its time."""
    return min(own.total, _LONGEST) << _RANK_BITS | rank


def slowest_rank(own: RankTime, total: int, largest: int, cluster: Cluster) -> SlowestRank | None:
    """Return the slowest rank; None if its time is near the mean. A collective call.

    Ranks exchange a second message only if the result is not None.

    Args:
        own: this rank's times.
        total: the sum of the times of all ranks.
        largest: the maximum over ranks of `ranked`.
    """
    longest, rank = largest >> _RANK_BITS, largest & ((1 << _RANK_BITS) - 1)
    if longest * cluster.world_size < _NOTABLE * total or cluster.world_size == 1 or not total:
        return None
    (data,) = cluster.counts([own.data if rank == cluster.rank else 0])
    return SlowestRank(rank, longest * cluster.world_size / total, data / 1e6)
