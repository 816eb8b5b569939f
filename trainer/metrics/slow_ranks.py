"""The seconds of each rank's own work, by which the log names the slowest rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class RankTime(NamedTuple):
    """Seconds of an iteration in which a rank waits for no other: in all, and those of its data."""

    seconds: float
    data_seconds: float


class OwnTime:
    """Measures this rank's own work in an iteration, without waits for other ranks.

    On an accelerator the work is measured by events of its stream, without a wait: `take` is called after the host has
    waited for the stream anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._events: list[tuple[Any, Any]] = []
        self._seconds = self._data_seconds = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the block, or its work on an accelerator."""
        if self._module is None:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        begin, end = (self._module.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Count the block, which loads data, as the host's time."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._seconds += seconds
        self._data_seconds += seconds

    def take(self) -> RankTime:
        """Return the times since the last call."""
        for begin, end in self._events:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1e3
        times = RankTime(self._seconds, self._data_seconds)
        self._events, self._seconds, self._data_seconds = [], 0.0, 0.0
        return times


class SlowRanks:
    """The times of all ranks since the last line of the log."""

    def __init__(self) -> None:
        self._totals: list[RankTime] = []

    def add(self, times: Sequence[RankTime]) -> None:
        """Count the times of an iteration, in order of rank."""
        if not self._totals:
            self._totals = [RankTime(0.0, 0.0)] * len(times)
        pairs = zip(self._totals, times, strict=True)
        self._totals = [RankTime(a.seconds + b.seconds, a.data_seconds + b.data_seconds) for a, b in pairs]

    def take(self) -> str:
        """Return the slowest rank beside the median, the lower of two; empty for a single rank."""
        totals, self._totals = self._totals, []
        middle = statistics.median_low(total.seconds for total in totals) if totals else 0.0
        if len(totals) < 2 or middle <= 0.0:
            return ""
        rank = max(range(len(totals)), key=lambda number: totals[number].seconds)
        slowest = totals[rank]
        return f"slowest rank {rank}: {slowest.seconds / middle:.2f} x median (data {slowest.data_seconds:.1f} s)"
