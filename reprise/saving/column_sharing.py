"""Shared memory where a host's ranks assemble their columns into whole rows, stripe by stripe.

A stripe is a tensor extent. A rank with a tensor's columns has a short byte run in every row. The ranks assemble
these runs and write each full stripe in a single call.

Ranks exchange their pieces once, before writing; after that no rank waits for another. Each rank copies its columns
into the stripes and, after writing its own chunks, writes full stripes until none is left. Every stripe is written:
whichever rank fills it looks for full stripes afterwards. If a rank fails, its stripes stay unfilled and its report
fails the save.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import mmap
import os
import secrets
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reprise.commit.messages import Message
from reprise.commit.shared_attempt import SharedAttempt
from reprise.errors import CheckpointError
from reprise.format.box import Box, Image
from reprise.format.layout import PAGE_BYTES, Layout
from reprise.format.manifest import Piece
from reprise.ranks.channel import StoreChannel
from reprise.storage.holds import machine
from reprise.tensors.memory import populate

_log = logging.getLogger(__name__)

_PROCESSES = Path("/proc/self/ns/pid")  # ranks open each other's memory by process number
STRIPE_BYTES = 4 << 20
# The shared memory starts with a 4-byte counter per stripe.
MAX_STRIPES = 1 << 16
STRIPES_AT = 4 * MAX_STRIPES


@dataclass(frozen=True, slots=True)
class Stripe:
    """A tensor's bytes `[lo, hi)`, which this host's ranks hold together.

    Args:
        memory: Where they assemble it.
        number: Its counter there.
        place: Its offset there, congruent to the file offset modulo a page.
    """

    memory: SharedMemory
    number: int
    lo: int
    hi: int
    place: int

    @property
    def size(self) -> int:
        return self.hi - self.lo


Stripes = Mapping[str, Sequence[Stripe]]  # by tensor, in the tensor's order
_Rows = Mapping[str, Sequence[Sequence[int]]]  # stripes in a message: number, first byte, end, place


def _stripes_of(pieces: Sequence[Piece], layout: Layout) -> _Rows:
    """Return the stripes completely filled by these pieces. The pieces' order does not matter.

    Args:
        pieces: The strided pieces from all the host's ranks.
    """
    by_tensor = defaultdict[str, list[Piece]](list)
    for piece in pieces:
        by_tensor[piece.name].append(piece)
    stripes, number, end = defaultdict[str, list[tuple[int, int, int, int]]](list), 0, STRIPES_AT
    for name in sorted(by_tensor):
        place, total = layout.places[name], layout.places[name].spec.total_bytes
        images = [(place.spec.image(piece.box), piece) for piece in by_tensor[name]]
        cuts = [0, *range(STRIPE_BYTES - place.offset % STRIPE_BYTES, total, STRIPE_BYTES), total]
        for lo, hi in itertools.pairwise(cuts):
            size = sum(len(_common(packed, piece.lo, piece.hi, lo, hi)) for packed, piece in images)
            if size == hi - lo and number < MAX_STRIPES:
                start = end + (place.offset + lo - end) % PAGE_BYTES
                stripes[name].append((number, lo, hi, start))
                number, end = number + 1, start + hi - lo
    return stripes


def _common(packed: Image, lo: int, hi: int, first: int, end: int) -> range:
    """Return those of a packed image's bytes `[lo, hi)` that are among the tensor's bytes `[first, end)`."""
    return range(max(lo, packed.before(first)), min(hi, packed.before(end)))


def cut_by_stripes(
    packed: Image, lo: int, hi: int, stripes: Sequence[Stripe]
) -> Iterator[tuple[int, int, Stripe | None]]:
    """Split a packed image's bytes `[lo, hi)` into extents, in order, each with its stripe or None."""
    for stripe in stripes:
        if part := _common(packed, lo, hi, stripe.lo, stripe.hi):
            if lo < part.start:
                yield lo, part.start, None
            yield part.start, part.stop, stripe
            lo = part.stop
    if lo < hi:
        yield lo, hi, None


class SharedMemory:
    """An anonymous block of memory (memfd). The kernel frees it when the last process closes it.

    Args:
        address: Where the other processes on this host find the block: a path, and the block's own name there.
        total_bytes: The size of a new block.
    """

    def __init__(self, descriptor: int, address: str, total_bytes: int = 0) -> None:
        self.address, self._descriptor, self._lock = address, descriptor, threading.Lock()
        with contextlib.ExitStack() as on_error:
            on_error.callback(os.close, descriptor)
            if total_bytes:
                os.posix_fallocate(descriptor, 0, total_bytes)
            self._memory = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
            populate(self._memory)
            on_error.pop_all()

    @property
    def total_bytes(self) -> int:
        return self._memory.nbytes

    @staticmethod
    def make(total_bytes: int = STRIPES_AT) -> SharedMemory:
        """Create a block with the counters, and room for stripes.

        Raises:
            OSError: The system refuses the memory.
        """
        descriptor = os.memfd_create(f"checkpoint-{secrets.token_hex(8)}")
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        return SharedMemory(descriptor, f"{path} {os.readlink(path)}", total_bytes)

    @staticmethod
    def open(address: str) -> SharedMemory | None:
        """Open another process's block on this host. None if it cannot be opened or its name differs."""
        path, _, name = address.partition(" ")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if os.readlink(f"/proc/self/fd/{descriptor}") == name:
                return SharedMemory(descriptor, address)
            os.close(descriptor)  # another file has that descriptor now
        except OSError:
            pass
        return None

    def put(self, stripe: Stripe, packed: Image, lo: int, data: memoryview) -> None:
        """Copy a packed image's bytes, from `lo` on, into their stripe."""
        source = np.frombuffer(data, np.uint8)
        for shape, start, at in packed.boxes(lo, lo + data.nbytes):
            place = stripe.place + start - stripe.lo
            target = np.ndarray(shape, np.uint8, self._memory.data, place, packed.strides)
            np.copyto(target, source[at - lo : at - lo + target.size].reshape(shape))
        with self._locked():
            self._counters[stripe.number] += data.nbytes

    def close(self) -> None:
        """Close the descriptor. No thread may be using the memory."""
        self._memory = np.empty(0, np.uint8)
        os.close(self._descriptor)

    def claim(self, stripe: Stripe) -> memoryview | None:
        """Claim a full stripe. Exactly one thread on the host gets its bytes; all others get None."""
        if self._counters[stripe.number] == stripe.size:  # not yet worth the lock
            with self._locked():
                is_full, self._counters[stripe.number] = self._counters[stripe.number] == stripe.size, 0
            if is_full:
                return self._memory[stripe.place : stripe.place + stripe.size].data
        return None

    @property
    def _counters(self) -> npt.NDArray[np.uint32]:
        return self._memory[:STRIPES_AT].view(np.uint32)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:  # flock does not exclude threads that share a descriptor
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)


_Report = Sequence[Any]  # a rank's host, and its pieces: name, box (offset and shape), first byte, end


class LocalRanks:
    """A host's ranks and their shared memory.

    For each save, the host's first rank decides whether columns are assembled. Every other rank reports to it: its
    host, and its pieces, or None to opt out. The first rank answers with the memory address and the stripes.

    Args:
        channel: This rank's channel.
        ranks: The ranks expected on this host, including this rank. None share nothing.

    Attributes:
        ranks: The ranks to exchange pieces with. Empty if there are none.
    """

    def __init__(self, channel: StoreChannel, ranks: Sequence[int]) -> None:
        self._rank = channel.rank
        ranks = [channel.rank] if len(ranks) == 1 else ranks
        self.ranks = tuple(ranks) if channel.world_size > 1 else ()
        self._host = f"{machine(_PROCESSES)} {self.ranks}"
        self._memory: SharedMemory | None = None
        self._stays_out = False
        self._table: tuple[Layout, Sequence[_Report], _Rows] | None = None

    def join(self, shared: SharedAttempt, layout: Layout, pieces: Sequence[Piece], *, may_share: bool) -> Stripes:
        """Exchange strided pieces with the host's ranks. Return the stripes for their rows.

        Rows without a stripe are written row by row.

        All ranks on the host call this before any other step in the save can fail. Worker thread.

        Args:
            pieces: This rank's pieces whose rows are not contiguous in the tensor.
            may_share: Whether this rank takes part: it has the memory, and its main thread has not aborted the save.

        Raises:
            TrainerError: Another rank does not answer, or its memory cannot be opened.
        """
        first, *others = self.ranks
        report = self._host, list(map(astuple, pieces)) if may_share and not self._stays_out else None
        if self._rank == first:
            messages = shared.read_all("stripes", others).values()
            decision = self._decide([report, *(json.loads(message.payload) for message in messages)], layout)
            shared.put("stripes", Message(payload=json.dumps(decision).encode()))
        else:
            shared.put("stripes", Message(payload=json.dumps(report).encode()))
            decision = json.loads(shared.read("stripes", first).payload)
        if decision is None:
            return {}
        address, stripes = decision
        if self._memory is None or self._memory.address != address:
            self.drop()
            self._memory = SharedMemory.open(address)
        if self._memory is None:
            self._stays_out = True
            raise CheckpointError(
                "The ranks of this host cannot share memory to assemble columns",
                expected=f"the memory of rank {first}",
                found="it cannot be opened",
                fix="Later saves write columns row by row, which is slower.",
            )
        memory = self._memory
        return {name: [Stripe(memory, *row) for row in rows] for name, rows in stripes.items()}

    def drop(self) -> None:
        """Drop the memory. The next save uses a new block, since a failed rank may still write to the old block."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _decide(self, reports: Sequence[_Report], layout: Layout) -> tuple[str, _Rows] | None:
        """Return the shared memory's address and the stripes for all the host's ranks, or None to share nothing."""
        # A rank that considers itself the first of its host has sent its decision.
        if any(not report or report[0] != self._host for report in reports) and not self._stays_out:
            _log.warning("ranks %s are not all on one host: columns are written row by row", self.ranks)
            self._stays_out = True
        if self._stays_out or any(rows is None for _, rows in reports):
            return None
        if self._table is None or self._table[0] is not layout or self._table[1] != reports:
            pieces = [Piece(name, Box(*map(tuple, box)), lo, hi) for _, rows in reports for name, box, lo, hi in rows]
            self._table = layout, reports, _stripes_of(pieces, layout)
        stripes = self._table[2]
        if not stripes:
            return None
        _, lo, hi, place = [*stripes.values()][-1][-1]
        total_bytes = place + hi - lo
        if self._memory is None or self._memory.total_bytes < total_bytes:
            self.drop()
            try:
                self._memory = SharedMemory.make(total_bytes)
            except OSError as error:
                _log.warning("no shared memory, columns are written row by row: %s", error.strerror)
                self._stays_out = True
                return None
        return self._memory.address, stripes
