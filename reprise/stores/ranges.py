"""Objects' byte ranges, fetched once for all ranks on a host.

A request takes a store tens of milliseconds, whatever its size. So adjacent blocks of small tensors share a request,
and a range read by several ranks, or twice by a rank, is fetched once.
"""

from __future__ import annotations

import bisect
import errno
import functools
import tempfile
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import IO

from reprise.storage.files import FILE_SYSTEM

Span = tuple[int, int]  # first byte and end
Fetch = Callable[[int, int], memoryview]  # returns an object's bytes, given an offset and a count

# The largest request: two checkpoint blocks. With moto's server, 8 MiB requests took two thirds of the time of 4 MiB
# ones.
SLOT_BYTES = (8 << 20) + (128 << 10)
# An unplanned read takes at least this much: a header and the first small tensors, for instance.
WINDOW_BYTES = 64 << 10
# Planned spans at most this far apart share a request: tensors start on pages.
GAP_BYTES = 8 << 10
KEPT_BYTES = 512 << 20


@dataclass(slots=True, eq=False)
class _Range:
    start: int
    end: int
    body: Future[memoryview | int] = field(default_factory=Future)  # the bytes, or their offset in the spill file


class RangeCache:
    """Fetched ranges for all objects, on disk or, for the newest, in memory. All threads share a fetched range.

    Args:
        limit: Largest number of bytes in memory.

    Attributes:
        fetched_bytes: How many bytes were fetched.
    """

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._limit, self._kept_bytes, self.fetched_bytes = limit, 0, 0
        self._objects: dict[Hashable, list[_Range]] = defaultdict(list)  # ascending and disjoint
        self._kept: deque[tuple[list[_Range], _Range]] = deque()
        self._spill_bytes = 0
        self._lock = threading.Lock()

    def fill(
        self, version: Hashable, buffer: memoryview, offset: int, request: Span, fetch: Fetch, *, spills: bool = False
    ) -> None:
        """Fill a buffer from an offset in an object.

        Args:
            version: Identifies the object and its version.
            request: The range to fetch if it is absent, which covers the buffer.
            spills: Whether to keep the range on disk, if there is room.

        Raises:
            OSError: See `fetch`. The next read fetches a failed range again.
        """
        with self._lock:
            ranges = self._objects[version]
        at, end = offset, offset + buffer.nbytes
        while at < end:
            part, is_new = self._range_at(ranges, at, request)
            if is_new:
                self._fetch(ranges, part, fetch, spills=spills)
            stop = min(end, part.end)
            target, body = buffer[at - offset : stop - offset], part.body.result()
            if isinstance(body, memoryview):
                target[:] = body[at - part.start : stop - part.start]
            elif FILE_SYSTEM.read(self._spill.fileno(), target, offset=body + at - part.start) != target.nbytes:
                raise OSError(errno.EIO, "a file of fetched bytes ends early", str(self._spill.name))
            at = stop

    def _range_at(self, ranges: list[_Range], at: int, request: Span) -> tuple[_Range, bool]:
        """Return the range that contains the byte `at`, and whether it is new."""
        with self._lock:
            index = bisect.bisect_right(ranges, at, key=lambda part: part.start)
            if index and at < ranges[index - 1].end:
                return ranges[index - 1], False
            start = max([request[0], *(part.end for part in ranges[:index][-1:])])
            part = _Range(start, min([request[1], *(part.start for part in ranges[index : index + 1])]))
            ranges.insert(index, part)
            return part, True

    def _fetch(self, ranges: list[_Range], part: _Range, fetch: Fetch, *, spills: bool) -> None:
        try:
            body = fetch(part.start, part.end - part.start)
            place = self._spilled(body) if spills else None
        except Exception as error:
            with self._lock:
                ranges.remove(part)
            part.body.set_exception(error)
            raise
        part.body.set_result(body if place is None else place)
        with self._lock:
            self.fetched_bytes += body.nbytes
            if place is None:
                self._kept_bytes += body.nbytes
                self._kept.append((ranges, part))
            while self._kept_bytes > self._limit and len(self._kept) > 1:
                others, oldest = self._kept.popleft()
                self._kept_bytes -= oldest.end - oldest.start
                others.remove(oldest)

    def _spilled(self, body: memoryview) -> int | None:
        """Write a range to disk and return its offset there, or None if there is no room."""
        try:
            with self._lock:  # one file for all threads
                descriptor = self._spill.fileno()
                place, self._spill_bytes = self._spill_bytes, self._spill_bytes + body.nbytes
            FILE_SYSTEM.write(descriptor, [body], offset=place)
        except OSError:
            return None
        return place

    @functools.cached_property
    def _spill(self) -> IO[bytes]:
        return tempfile.TemporaryFile(prefix="reprise-store-")  # for this process


def requests_of(spans: Iterable[Span]) -> list[Span]:
    """Return requests for an object's spans, ascending and disjoint.

    Neighbors are joined up to `SLOT_BYTES`. A larger span is cut: its gaps contain other spans' bytes.
    """
    requests: list[Span] = []
    for first, last in sorted(spans):
        for low in range(max(first, requests[-1][1] if requests else 0), last, SLOT_BYTES):
            high = min(low + SLOT_BYTES, last)
            if requests and low - requests[-1][1] <= GAP_BYTES and high - requests[-1][0] <= SLOT_BYTES:
                requests[-1] = requests[-1][0], high
            else:
                requests.append((low, high))
    return requests
