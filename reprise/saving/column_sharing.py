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
import json
import logging
import mmap
import os
import secrets
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reprise.commit.shared_attempt import SharedAttempt
from reprise.errors import CheckpointError
from reprise.format.box import Box, Image
from reprise.format.layout import PAGE_BYTES, Layout
from reprise.format.manifest import Piece
from reprise.ranks.channel import StoreChannel
from reprise.storage.files import allocate
from reprise.tensors.memory import populate

_log = logging.getLogger(__name__)


STRIPE_BYTES = 4 << 20
# The shared memory starts with a page holding its name, followed by a 4-byte counter per stripe.
MAX_STRIPES = 1 << 16
COUNTERS_AT = PAGE_BYTES
STRIPES_AT = COUNTERS_AT + 4 * MAX_STRIPES


@dataclass(frozen=True, slots=True)
class Stripe:
    """A tensor's bytes `[lo, hi)`, which this host's ranks hold together.

    Args:
        place: Offset in the shared memory, congruent to the file offset modulo a page.
    """

    number: int
    lo: int
    hi: int
    place: int

    @property
    def size(self) -> int:
        return self.hi - self.lo


Stripes = Mapping[str, Sequence[Stripe]]  # by tensor, in the tensor's order


def stripes_of(pieces: Sequence[Piece], layout: Layout) -> Stripes:
    """Return the stripes completely filled by these pieces. The pieces' order does not matter.

    Args:
        pieces: The strided pieces from all the host's ranks.
    """
    filled: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for piece in pieces:
        place = layout.places[piece.name]
        for number, count in _shares(piece, place.spec.image(piece.box), place.offset):
            filled[piece.name][number] += count
    stripes: dict[str, list[Stripe]] = {}
    number, end = 0, STRIPES_AT
    for name in sorted(filled):
        place = layout.places[name]
        for index, count in sorted(filled[name].items()):
            lo = max(0, index * STRIPE_BYTES - place.offset)
            hi = min(place.spec.total_bytes, (index + 1) * STRIPE_BYTES - place.offset)
            if count == hi - lo and number < MAX_STRIPES:
                start = end + (place.offset + lo - end) % PAGE_BYTES
                stripes.setdefault(name, []).append(Stripe(number, lo, hi, start))
                number, end = number + 1, start + hi - lo
    return stripes


def shared_bytes(stripes: Stripes) -> int:
    """Return how many bytes of memory all stripes need."""
    return max(
        (stripe.place + stripe.size for stripes_of_tensor in stripes.values() for stripe in stripes_of_tensor),
        default=STRIPES_AT,
    )


def cut_by_stripes(
    packed: Image, lo: int, hi: int, stripes: Sequence[Stripe]
) -> Iterator[tuple[int, int, Stripe | None]]:
    """Split a packed image's bytes `[lo, hi)` into extents, in order, each with its stripe or None."""
    for stripe in stripes:
        first, last = max(lo, packed.before(stripe.lo)), min(hi, packed.before(stripe.hi))
        if first >= last:
            continue
        if lo < first:
            yield lo, first, None
        yield first, last, stripe
        lo = last
    if lo < hi:
        yield lo, hi, None


def _shares(piece: Piece, packed: Image, at: int) -> Iterator[tuple[int, int]]:
    """Yield the number of every file stripe overlapping a piece, and how many bytes they share."""
    first = (at + packed.start) // STRIPE_BYTES
    last = (at + packed.start + packed.extent - 1) // STRIPE_BYTES
    for number in range(first, last + 1):
        lo = max(piece.lo, packed.before(number * STRIPE_BYTES - at))
        hi = min(piece.hi, packed.before((number + 1) * STRIPE_BYTES - at))
        if lo < hi:
            yield number, hi - lo


_NAME = "checkpoint"
_NAME_BYTES = 16
_Rows = list[list[Any]]  # pieces in a message: name, box offset, box shape, first byte, end


class SharedMemory:
    """An anonymous block of memory (memfd). The kernel frees it when the last process closes it."""

    def __init__(self, descriptor: int, address: str) -> None:
        self.address = address
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._memory = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
        self.total_bytes = self._memory.nbytes
        populate(self._memory)

    @staticmethod
    def make(total_bytes: int = STRIPES_AT) -> SharedMemory:
        """Create a block with its name, the counters, and room for stripes.

        Raises:
            OSError: The system refuses the memory.
        """
        name = secrets.token_bytes(_NAME_BYTES)
        descriptor = os.memfd_create(_NAME)
        with contextlib.ExitStack() as on_error:
            on_error.callback(os.close, descriptor)
            allocate(descriptor, total_bytes)
            os.pwrite(descriptor, name, 0)
            memory = SharedMemory(descriptor, f"{os.getpid()} {descriptor} {name.hex()}")
            on_error.pop_all()
        return memory

    @staticmethod
    def open(address: str) -> SharedMemory | None:
        """Open another process's block on this host. None if it cannot be opened or its name differs."""
        pid, number, name = address.split()
        path = f"/proc/{pid}/fd/{number}"
        try:
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # the descriptor now belongs to another file
                return None
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            with contextlib.ExitStack() as on_error:
                on_error.callback(os.close, descriptor)
                if os.pread(descriptor, _NAME_BYTES, 0) != bytes.fromhex(name):
                    return None
                memory = SharedMemory(descriptor, address)
                on_error.pop_all()
        except OSError:
            return None
        return memory

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

    def is_full(self, stripe: Stripe) -> bool:
        """Return whether a stripe holds all its bytes and is not yet claimed."""
        return int(self._counters[stripe.number]) == stripe.size

    def claim(self, stripe: Stripe) -> memoryview | None:
        """Claim a full stripe. Exactly one thread on the host gets its bytes; all others get None."""
        with self._locked():
            if not self.is_full(stripe):
                return None
            self._counters[stripe.number] = 0  # ready for the next save
        return self._memory[stripe.place : stripe.place + stripe.size].data

    @property
    def _counters(self) -> npt.NDArray[np.uint32]:
        return self._memory[COUNTERS_AT:STRIPES_AT].view(np.uint32)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:  # flock does not exclude threads that share a descriptor
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)


@dataclass(frozen=True, slots=True)
class Sharing:
    """A save's stripes by tensor, assembled with the host's other ranks. Thread-safe.

    Args:
        files: The files with stripes.
        turn: Where this rank starts looking for full stripes, as a fraction from 0 to 1. Ranks start at different
            places, so they do not compete for the same stripe.
    """

    memory: SharedMemory
    stripes: Stripes
    files: frozenset[str]
    turn: float

    def full(self) -> Iterator[tuple[str, Stripe, memoryview]]:
        """Claim full stripes and yield each with its tensor and bytes. The caller must write them."""
        order = [(tensor, stripe) for tensor, stripes in self.stripes.items() for stripe in stripes]
        first = int(self.turn * len(order))
        for tensor, stripe in order[first:] + order[:first]:
            if self.memory.is_full(stripe) and (data := self.memory.claim(stripe)) is not None:
                yield tensor, stripe, data


class LocalRanks:
    """A host's ranks and their shared memory.

    For each save, the host's first rank decides whether columns are assembled. Every other rank reports to it: its
    pieces, or None to opt out. The first rank answers with all ranks' pieces and the memory address.

    Args:
        channel: The worker thread's store channel.
        ranks: The ranks expected on this host, including this rank. Fewer than two share nothing.
    """

    def __init__(self, channel: StoreChannel, ranks: Sequence[int]) -> None:
        self._channel, self._rank = channel, channel.rank
        self._ranks = tuple(ranks) if len(ranks) > 1 else (channel.rank,)
        self._memory: SharedMemory | None = None
        self._stays_out = False
        self._table: tuple[Layout, _Rows, Stripes] | None = None

    @contextlib.contextmanager
    def check_same_host(self, channel: StoreChannel, name: str) -> Iterator[None]:
        """Check whether the ranks run on the same host; if not, share nothing. Main thread, all ranks.

        Args:
            name: A key prefix, new on this channel. Its messages are deleted after the block, within which all ranks
                must have read them.

        Raises:
            LaunchError: A rank does not answer.
        """
        identity = f"{_host()} {self._ranks}".encode()
        channel.put(f"{name}/{self._rank}", identity)
        peers = [rank for rank in self._ranks if rank != self._rank]
        if any(channel.read(f"{name}/{rank}", sender=f"rank {rank}") != identity for rank in peers):
            _log.warning("ranks %s are not all on one host: columns are written row by row", self._ranks)
            self._ranks = (self._rank,)
        yield
        channel.delete([f"{name}/{self._rank}"])

    def join(
        self, shared: SharedAttempt, layout: Layout, pieces: Sequence[Piece], *, may_share: bool
    ) -> Sharing | None:
        """Exchange strided pieces with the host's ranks. Return None if they are written row by row instead.

        All ranks on the host call this before any other step in the save can fail. Worker thread.

        Args:
            pieces: This rank's pieces whose rows are not contiguous in the tensor.
            may_share: Whether this rank takes part: it has the memory, and its main thread has not aborted the save.

        Raises:
            TrainerError: Another rank does not answer, or its memory cannot be opened.
        """
        if len(self._ranks) < 2:
            return None
        first, *others = self._ranks
        rows = [[p.name, p.box.offset, p.box.shape, p.lo, p.hi] for p in pieces]
        report = rows if may_share and not self._stays_out else None
        message: object = report
        if self._rank == first:
            message = decision = self._decide([report, *(self._read(shared, rank) for rank in others)], layout)
        shared.put(self._channel, f"stripes/{self._rank}", json.dumps(message).encode())
        if self._rank != first:
            decision = self._read(shared, first)
        if decision is None:
            return None
        address, rows = decision
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
        turn, stripes = self._ranks.index(self._rank) / len(self._ranks), self._stripes(rows, layout)
        return Sharing(self._memory, stripes, frozenset(layout.places[tensor].file for tensor in stripes), turn)

    def _read(self, shared: SharedAttempt, rank: int) -> Any:
        return json.loads(self._channel.read(f"{shared.key}/stripes/{rank}", sender=f"rank {rank}"))

    def drop(self) -> None:
        """Drop the memory. The next save uses a new block, since a failed rank may still write to the old block."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _decide(self, reports: Sequence[_Rows | None], layout: Layout) -> tuple[str, _Rows] | None:
        """Return the shared memory's address and the pieces from all the host's ranks, or None to share nothing."""
        rows = [row for report in reports for row in report or ()]
        if None in reports or not (stripes := self._stripes(rows, layout)):
            return None
        if self._memory is None or self._memory.total_bytes < shared_bytes(stripes):
            self.drop()
            try:
                self._memory = SharedMemory.make(shared_bytes(stripes))
            except OSError as error:
                _log.warning("no shared memory, columns are written row by row: %s", error.strerror)
                self._stays_out = True
                return None
        return self._memory.address, rows

    def _stripes(self, rows: _Rows, layout: Layout) -> Stripes:
        """Return the stripes for all ranks' pieces, which are computed again only when the pieces change."""
        if self._table is None or self._table[0] is not layout or self._table[1] != rows:
            pieces = [Piece(name, Box(tuple(offset), tuple(shape)), lo, hi) for name, offset, shape, lo, hi in rows]
            self._table = layout, rows, stripes_of(pieces, layout)
        return self._table[2]


def _host() -> str:
    """Identify this host: equal exactly for processes with the same user seeing each other in `/proc`."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{boot.read_text().strip()} {Path('/proc/self/ns/pid').stat().st_ino} {os.getuid()}"
    except OSError:
        return secrets.token_hex(8)
