"""Byte ranges of objects, fetched once for all ranks of a host.

A request costs a store tens of milliseconds, whatever its size. So blocks of small tensors, which lie beside each
other, share a request, and a range read by several ranks, or twice by a rank, is fetched once.
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

Span = tuple[int, int]  # the first byte and the end
Fetch = Callable[[int, int], memoryview]  # returns the bytes of an object from an offset, by their number

# The largest request: two blocks of a checkpoint. With moto's server, requests of 8 MiB took two thirds of the time of
# those of 4 MiB.
SLOT_BYTES = (8 << 20) + (128 << 10)
# An unplanned read takes at least this much: a header and the first small tensors, for instance.
WINDOW_BYTES = 64 << 10
# Planned spans this far apart share a request: tensors begin on pages.
GAP_BYTES = 8 << 10
KEPT_BYTES = 512 << 20


@dataclass(slots=True, eq=False)
class _Range:
    start: int
    end: int
    body: Future[memoryview | int] = field(default_factory=Future)  # the bytes, or their place in the spill file


class RangeCache:
    """The fetched ranges of all objects, on disk or the newest in memory. A range fetched by one thread serves all.

    Args:
        limit: bytes in memory.

    Attributes:
        fetched_bytes: how many bytes were fetched.
    """

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._limit, self._kept_bytes, self.fetched_bytes = limit, 0, 0
        self._objects: dict[Hashable, list[_Range]] = defaultdict(list)  # in ascending order and apart
        self._kept: deque[tuple[list[_Range], _Range]] = deque()
        self._spill_bytes = 0
        self._lock = threading.Lock()

    def fill(
        self, version: Hashable, buffer: memoryview, offset: int, request: Span, fetch: Fetch, *, spills: bool = False
    ) -> None:
        """Fill a buffer from an offset of an object.

        Args:
            version: names the object and its version.
            request: the range to fetch where it is absent, with all bytes of the buffer.
            spills: whether to keep the range on disk, as far as there is room.

        Raises:
            OSError: as `fetch`; the failed range is fetched again by the next read.
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
        """Return the range with the byte `at`, and whether it is new."""
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
        """Write a range to disk and return its place there; None if there is no room."""
        try:
            with self._lock:  # which makes one file of all threads
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
    """Return the requests for spans of an object, in ascending order and apart.

    Neighbors are joined up to `SLOT_BYTES`. A larger span is cut: it has gaps with bytes of other spans.
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
