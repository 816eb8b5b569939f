"""Measures each rank's own work, by which the log names the slowest rank."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

# The slowest rank gets a log line if its time is at least this multiple of the mean.
_NOTABLE = 1.1


class RankTime(NamedTuple):
    """A rank's working time in microseconds: in total, scaled to a mean share of the batch, and for loading data."""

    total: int
    data: int


class OwnTime:
    """Measures this rank's own work since the last log line, excluding waits for other ranks.

    On an accelerator, events on its stream measure the work. The host never waits for them: unfinished work counts
    toward the next line.

    Attributes:
        load: This rank's micro-batch count in the iteration, divided by the mean over ranks.
        last_load_s: How many seconds the last data loading took.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self.load = 1.0
        self._events: list[tuple[Any, Any, float]] = []
        self._seconds = self._data_seconds = self.last_load_s = 0.0

    @contextmanager
    def working(self, load: float = 1.0) -> Iterator[None]:
        """Count the time for the block, or for its work on an accelerator, divided by `load`."""
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
        """Count the block, which loads the iteration's data, in host time."""
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
        """Add the times for events already passed by the stream."""
        while self._events and self._events[0][1].query():
            begin, end, load = self._events.pop(0)
            self._seconds += begin.elapsed_time(end) / 1e3 / load


def slowest_rank(times: Sequence[RankTime]) -> str | None:
    """Describe the slowest rank for the log, given all ranks' times. Return None if its time is near the mean."""
    longest = max(times, key=lambda time: time.total)
    mean = sum(time.total for time in times) / len(times)
    if len(times) == 1 or not mean or longest.total < _NOTABLE * mean:
        return None
    rank, ratio = times.index(longest), longest.total / mean
    return f"slowest rank {rank}: {ratio:.2f} x mean (data {longest.data / 1e6:.1f} s)"
