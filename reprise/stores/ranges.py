"""Byte ranges of objects, each requested once and kept in memory while there is room.

A request costs a store tens of milliseconds, whatever its size. So blocks of small tensors, which lie beside each
other, share a request, and what was read of a file before its tensors are filled is not requested again.
"""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from reprise.stores.wire import SLOT_BYTES

Span = tuple[int, int]  # the first byte and the end
Request = tuple[int, int, int]  # the first byte, the end, and the number of reads from it; 0 for any number
Fetch = Callable[[memoryview, int], None]  # fills a buffer from an offset in the object

# An unplanned read takes at least this much: a header and the first small tensors, for instance.
WINDOW_BYTES = 64 << 10
# Planned spans this far apart share a request: tensors begin on pages.
GAP_BYTES = 8 << 10
KEPT_BYTES = 96 << 20


@dataclass(slots=True, eq=False)
class _Range:
    start: int
    end: int
    reads: int
    body: Future[memoryview]


class Ranges:
    """The ranges of one version of an object. Threads in need of the same range wait for the first of them.

    Args:
        size: of the object, in bytes.
        memory: of all objects.

    Attributes:
        planned: the requests to come, in ascending order and apart.
    """

    def __init__(self, size: int, memory: RangeMemory) -> None:
        self._size, self._memory = size, memory
        self.planned: Sequence[Request] = ()
        self._ranges: list[_Range] = []  # in ascending order and apart
        self._lock = threading.Lock()

    def fill(self, buffer: memoryview, offset: int, fetch: Fetch) -> None:
        """Fill a buffer of bytes from an offset of the object.

        Raises:
            OSError: as `fetch`; the failed range is requested again by the next read.
        """
        at, end = offset, offset + buffer.nbytes
        while at < end:
            part, is_new = self._range_at(at, end)
            stop = min(end, part.end)
            target = buffer[at - offset : stop - offset]
            if is_new is None:
                fetch(target, at)
            else:
                if is_new:
                    self._fetch(part, fetch)
                target[:] = part.body.result()[at - part.start : stop - part.start]
                self._count_read(part)
            at = stop

    def drop(self, part: _Range) -> None:
        """Forget a range."""
        with self._lock:
            if part in self._ranges:
                self._ranges.remove(part)

    def _count_read(self, part: _Range) -> None:
        """Drop a range after the last of its reads."""
        with self._lock:
            part.reads -= 1
        if part.reads == 0:
            self._memory.release(part)
            self.drop(part)

    def _fetch(self, part: _Range, fetch: Fetch) -> None:
        body = memoryview(np.empty(part.end - part.start, np.uint8))  # type: ignore[arg-type]
        try:
            fetch(body, part.start)
        except BaseException as error:
            self.drop(part)
            part.body.set_exception(error)
            raise
        self._memory.keep(self, part)
        part.body.set_result(body)

    def _range_at(self, at: int, end: int) -> tuple[_Range, bool | None]:
        """Return the range with the byte `at`, and whether it is to be fetched; None where no other read needs it."""
        with self._lock:
            index = bisect.bisect_right(self._ranges, at, key=lambda part: part.start)
            before = self._ranges[index - 1] if index else None
            if before is not None and at < before.end:
                return before, False
            start, stop, reads = self._request_at(at, end)
            start = max(start, 0 if before is None else before.end)
            stop = min(stop, self._size, *(part.start for part in self._ranges[index : index + 1]))
            part = _Range(start, stop, reads, Future())
            if start == at and stop <= end and reads == 1:
                return part, None
            self._ranges.insert(index, part)
            return part, True

    def _request_at(self, at: int, end: int) -> Request:
        index = bisect.bisect_right(self.planned, at, key=lambda request: request[0])
        if index and at < self.planned[index - 1][1]:
            return self.planned[index - 1]
        return at, max(end, at + WINDOW_BYTES), 0


class RangeMemory:
    """What ranges of all objects take in memory; the oldest goes first."""

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._limit, self._total_bytes = limit, 0
        self._owners: OrderedDict[_Range, Ranges] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, owner: Ranges, part: _Range) -> None:
        """Count a range, and drop the oldest beyond the limit."""
        dropped = []
        with self._lock:
            self._owners[part] = owner
            self._total_bytes += part.end - part.start
            while self._total_bytes > self._limit and len(self._owners) > 1:
                oldest, other_owner = self._owners.popitem(last=False)
                self._total_bytes -= oldest.end - oldest.start
                dropped.append((oldest, other_owner))
        for oldest, other_owner in dropped:
            other_owner.drop(oldest)

    def release(self, part: _Range) -> None:
        """Count a range no more."""
        with self._lock:
            if self._owners.pop(part, None) is not None:
                self._total_bytes -= part.end - part.start


def requests_of(spans: Iterable[Span]) -> Iterator[Request]:
    """Yield the requests for spans of an object, in ascending order and apart.

    Neighbors are joined up to `SLOT_BYTES`. A larger span is cut: it has gaps with bytes of other spans.
    """
    start = end = reads = 0
    for first, last in sorted(spans):
        is_apart = first >= end and last - first <= SLOT_BYTES
        reads = reads if is_apart else 0
        for low in range(max(first, end), last, SLOT_BYTES):
            high = min(low + SLOT_BYTES, last)
            if start < end and low - end <= GAP_BYTES and high - start <= SLOT_BYTES:
                end, reads = high, reads + 1 if reads and is_apart else 0
                continue
            if start < end:
                yield start, end, reads
            start, end, reads = low, high, int(is_apart)
    if start < end:
        yield start, end, reads
