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
from collections import defaultdict
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


@dataclass(slots=True, eq=False)
class _Range:
    start: int
    end: int
    body: Future[memoryview | int] = field(default_factory=Future)  # the offset in the file, or the bytes if it is full


class RangeCache:
    """Fetched ranges for all objects, in an unnamed file. All threads share a fetched range."""

    def __init__(self) -> None:
        self._objects: dict[Hashable, list[_Range]] = defaultdict(list)  # ascending and disjoint
        self._file_bytes = 0
        self._lock = threading.Lock()

    def fill(self, version: Hashable, buffer: memoryview, offset: int, request: Span, fetch: Fetch) -> None:
        """Fill a buffer from an offset in an object.

        Args:
            version: Identifies the object and its version.
            request: The range to fetch if it is absent, which covers the buffer.

        Raises:
            OSError: See `fetch`. The next read fetches a failed range again.
        """
        with self._lock:
            ranges = self._objects[version]
        at, end = offset, offset + buffer.nbytes
        while at < end:
            part, is_new = self._range_at(ranges, at, request)
            if is_new:
                self._fetch(ranges, part, fetch)
            stop = min(end, part.end)
            target, body = buffer[at - offset : stop - offset], part.body.result()
            if isinstance(body, memoryview):
                target[:] = body[at - part.start : stop - part.start]
            elif FILE_SYSTEM.read(self._file.fileno(), target, offset=body + at - part.start) != target.nbytes:
                raise OSError(errno.EIO, "a file of fetched bytes ends early", str(self._file.name))
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

    def _fetch(self, ranges: list[_Range], part: _Range, fetch: Fetch) -> None:
        is_kept = False
        try:
            body = fetch(part.start, part.end - part.start)
            try:
                part.body.set_result(self._written(body))
                is_kept = True
            except OSError:  # no room: whoever waits for the bytes gets them, and the next read fetches them again
                part.body.set_result(body)
        except Exception as error:
            part.body.set_exception(error)
            raise
        finally:
            if not is_kept:
                with self._lock:
                    ranges.remove(part)

    def _written(self, body: memoryview) -> int:
        """Write a range to the file, and return its offset there."""
        with self._lock:
            descriptor = self._file.fileno()
            place, self._file_bytes = self._file_bytes, self._file_bytes + body.nbytes
        FILE_SYSTEM.write(descriptor, body, offset=place)
        return place

    @functools.cached_property
    def _file(self) -> IO[bytes]:
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
