"""Objects' byte ranges, fetched once for all ranks on a host.

A request takes a store tens of milliseconds, whatever its size. So adjacent blocks of small tensors share a request,
and a range read by several ranks, or twice by a rank, is fetched once while it is kept.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import functools
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
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


# How much a process that reads alone keeps: it rarely reads a range again.
KEPT_BYTES = 512 << 20


@dataclass(slots=True, eq=False)
class _Range:
    start: int
    end: int
    position: int = sys.maxsize  # in the ring, once it is there
    body: Future[memoryview] = field(default_factory=Future)  # empty if the bytes are in the ring


class RangeCache:
    """The newest fetched ranges of all objects, in an unnamed file used as a ring. All threads share a range.

    Args:
        most_bytes: The file's largest size in bytes. It is at most half of the free space in its folder, too.
    """

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._objects: dict[Hashable, list[_Range]] = defaultdict(list)  # ascending and disjoint
        # Position p is at byte p % limit of the file. The bytes from the first to the end are there.
        self._first = self._end = 0
        self._lock, self._write_lock = threading.Lock(), threading.Lock()

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
            body = self._fetched(ranges, part, fetch) if is_new else part.body.result()
            stop = min(end, part.end)
            target, start = buffer[at - offset : stop - offset], at - part.start
            if body:
                target[:] = body[start : start + target.nbytes]
            else:
                file, limit = self._ring
                if FILE_SYSTEM.read(file.fileno(), target, offset=part.position % limit + start) != target.nbytes:
                    raise OSError(errno.EIO, "a file of fetched bytes ends early", str(file.name))
                if part.position < self._first:  # newer ranges may have taken its place meanwhile
                    continue
            at = stop

    def _range_at(self, ranges: list[_Range], at: int, request: Span) -> tuple[_Range, bool]:
        """Return the range that contains the byte `at`, and whether it is new."""
        with self._lock:
            index = bisect.bisect_right(ranges, at, key=lambda part: part.start)
            if index and at < ranges[index - 1].end:
                part = ranges[index - 1]
                if part.position >= self._first:
                    return part, False
                ranges[index - 1] = part = _Range(part.start, part.end)
            else:
                start = max([request[0], *(part.end for part in ranges[:index][-1:])])
                part = _Range(start, min([request[1], *(part.start for part in ranges[index : index + 1])]))
                ranges.insert(index, part)
            return part, True

    def _fetched(self, ranges: list[_Range], part: _Range, fetch: Fetch) -> memoryview:
        """Fetch a new range for all who wait for it, and return its bytes."""
        try:
            body = fetch(part.start, part.end - part.start)
            with contextlib.suppress(OSError):  # no room: who waits gets the bytes, the next read fetches them again
                self._keep(part, body)
            part.body.set_result(body if part.position == sys.maxsize else body[:0])
            return body
        except Exception as error:
            part.body.set_exception(error)
            raise
        finally:
            if part.position == sys.maxsize:
                with self._lock:
                    ranges.remove(part)

    def _keep(self, part: _Range, body: memoryview) -> None:
        """Write a range to the ring, over the oldest ones.

        Raises:
            OSError: There is no room.
        """
        with self._write_lock:  # a file takes one write at a time anyway
            file, limit = self._ring
            if body.nbytes > limit:
                raise OSError(errno.ENOSPC, "no room for a range", str(file.name))
            position = self._end
            if position % limit + body.nbytes > limit:  # skip the rest, where it does not fit
                position += -position % limit
            self._end = position + body.nbytes
            self._first = max(0, self._end - limit)
            FILE_SYSTEM.write(file.fileno(), body, offset=position % limit)
            part.position = position

    @functools.cached_property
    def _ring(self) -> tuple[IO[bytes], int]:
        """Return the file, and the most bytes in it."""
        file = tempfile.TemporaryFile(prefix="reprise-store-")  # noqa: SIM115 - for this process
        free = FILE_SYSTEM.free_bytes(Path(tempfile.gettempdir()))
        return file, min(self._most_bytes, KEPT_BYTES if free is None else free // 2)


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
