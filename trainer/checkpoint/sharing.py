"""Memory that the ranks of one host share, in which columns become whole rows. Where is told in `strips.py`.

No rank waits for another here once all have said what they write: each puts its columns into the strips and then, when
it has nothing else to do, writes full strips until there are none. So all are written: the rank that fills a strip
looks for full ones later. If a rank fails, its strips stay unfilled, and its report fails the save.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import operator
import os
import secrets
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from trainer.checkpoint.arena import populate
from trainer.checkpoint.board import Board
from trainer.checkpoint.box import Image, stretch
from trainer.checkpoint.commit import Attempt, decode, encode
from trainer.checkpoint.layout import PAGE_BYTES, Layout
from trainer.checkpoint.manifest import WrittenPiece
from trainer.checkpoint.ownership import Piece
from trainer.checkpoint.strips import COUNTERS_AT, STRIPS_AT, Strip, Strips, shared_bytes, strips_of
from trainer.errors import CheckpointError, LaunchError

_log = logging.getLogger(__name__)

_NAME = "checkpoint"
_NAME_BYTES = 16
_JOINS, _STAYS_OUT, _FAILED = b"+", b"-", b"!"


class SharedMemory:
    """A block of memory without a name in any file system: it is gone with the last process that has it."""

    def __init__(self, descriptor: int, address: bytes) -> None:
        self.address = address
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._memory = np.frombuffer(mmap.mmap(descriptor, STRIPS_AT), np.uint8)

    @staticmethod
    def make() -> SharedMemory:
        """Return a new one, nearly empty."""
        descriptor = os.memfd_create(_NAME)
        os.ftruncate(descriptor, STRIPS_AT)
        name = secrets.token_bytes(_NAME_BYTES)
        os.pwrite(descriptor, name, 0)
        return SharedMemory(descriptor, b"%d %d %s" % (os.getpid(), descriptor, name.hex().encode()))

    @staticmethod
    def open(address: bytes) -> SharedMemory | None:
        """Return that of another process of this host; None if it cannot be had, or is another one."""
        pid, number, name = address.decode().split()
        path = f"/proc/{pid}/fd/{number}"
        try:
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # a process of another container has that number
                return None
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        if os.pread(descriptor, _NAME_BYTES, 0) != bytes.fromhex(name):
            os.close(descriptor)
            return None
        return SharedMemory(descriptor, address)

    def reach(self, total_bytes: int, *, index: int, count: int) -> None:
        """Be at least so large, and have the pages there: share `index` of `count` is this process's to make.

        Raises:
            OSError: if there is no memory for it.
        """
        if self._memory.nbytes >= total_bytes:
            return
        if os.fstat(self._descriptor).st_size < total_bytes:  # only ever to the same size, whoever comes first
            os.ftruncate(self._descriptor, total_bytes)
        share = -(-total_bytes // count // PAGE_BYTES) * PAGE_BYTES
        lo, hi = min(index * share, total_bytes), min((index + 1) * share, total_bytes)
        if lo < hi:
            os.posix_fallocate(self._descriptor, lo, hi - lo)
        self._memory = np.frombuffer(mmap.mmap(self._descriptor, total_bytes), np.uint8)
        populate(self._memory)

    def put(self, strip: Strip, packed: Image, lo: int, data: memoryview) -> None:
        """Put bytes of a packed image, from `lo` on, into their strip."""
        strides = (*(stride for _, stride in packed.loops), 1)
        source, at = np.frombuffer(data, np.uint8), 0
        for box in stretch(packed.packed_shape, lo, lo + data.nbytes):
            start = packed.start + sum(map(operator.mul, box.offset, strides)) - strip.lo
            there = np.ndarray(box.shape, np.uint8, self._memory.data, strip.place + start, strides)
            np.copyto(there, source[at : at + box.numel].reshape(box.shape))
            at += box.numel
        with self._locked():
            self._counters[strip.number] += data.nbytes

    def close(self) -> None:
        """Let go of it."""
        os.close(self._descriptor)

    def is_full(self, strip: Strip) -> bool:
        """Return whether all bytes of a strip are there, and nobody has claimed it."""
        return int(self._counters[strip.number]) == strip.size

    def claim(self, strip: Strip) -> memoryview | None:
        """Return the bytes of a full strip to the one process and thread that is to write it."""
        with self._locked():
            if not self.is_full(strip):
                return None
            self._counters[strip.number] = 0  # as the next save wants it
        return self._memory[strip.place : strip.place + strip.size].data

    @property
    def _counters(self) -> npt.NDArray[np.uint32]:
        return self._memory[COUNTERS_AT:STRIPS_AT].view(np.uint32)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:  # threads do not lock each other out of what they have opened once
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)


class Sharing:
    """What one save puts together with the other ranks of the host. Its threads may use it at once.

    Args:
        turn: the share of the strips after which this rank begins to look for full ones, so that the ranks of a host
            do not all look for the same.
    """

    def __init__(self, memory: SharedMemory, strips: Strips, layout: Layout, *, turn: float) -> None:
        self.files = {layout.places[tensor].file for tensor in strips}
        self._memory, self._strips = memory, strips
        order = [(tensor, strip) for tensor, found in strips.items() for strip in found]
        first = int(turn * len(order))
        self._order = order[first:] + order[:first]

    def strips(self, tensor: str) -> Sequence[Strip]:
        """Return the strips of a tensor, in its order."""
        return self._strips.get(tensor, ())

    def put(self, strip: Strip, packed: Image, lo: int, data: memoryview) -> None:
        """Put bytes of a packed image, from `lo` on, into their strip."""
        self._memory.put(strip, packed, lo, data)

    def full(self) -> Iterator[tuple[str, Strip, memoryview]]:
        """Yield the strips, with their tensors and bytes, that are for the caller to write now; no other gets them."""
        for tensor, strip in self._order:
            if self._memory.is_full(strip) and (data := self._memory.claim(strip)) is not None:
                yield tensor, strip, data


class Neighbours:
    """The ranks of one host, seen from the worker thread of one of them, and the memory that they share.

    Args:
        board: the worker thread's.
        ranks: all ranks of this host, this one among them; fewer than two share nothing.
    """

    def __init__(self, board: Board, ranks: Sequence[int]) -> None:
        self._ranks, self._rank = list(ranks), board.rank
        self._board = board
        self._memory: SharedMemory | None = None
        self._has_no_room = False
        self._posted: list[str] = []

    def join(self, attempt: Attempt, pieces: Sequence[Piece], *, may_share: bool) -> Sharing | None:
        """Tell each other what is written in rows that lie apart; return None where that goes to the file row by row.

        All ranks of the host call it, before anything else of the save that can fail.

        Args:
            pieces: this rank's that have rows apart.
            may_share: whether this rank has the memory for it.

        Raises:
            TrainerError: if another one says that it has failed, or says nothing.
        """
        if len(self._ranks) < 2:
            return None
        self._board.forget(self._posted)  # of a save that is over
        self._posted.clear()
        self._meet(attempt)
        joins = may_share and self._memory is not None and not self._has_no_room
        mine = [WrittenPiece(piece.name, piece.box, piece.lo, piece.hi, b"") for piece in pieces]
        report = (_JOINS if joins else _STAYS_OUT) + encode(mine, attempt.layout)
        self._post(_key(attempt.name, self._rank), report)
        everyone, theirs = [report], list(pieces)
        for rank in self._ranks:
            if rank != self._rank:
                everyone.append(self._board.read(_key(attempt.name, rank), sender=f"rank {rank}"))
                if everyone[-1].startswith(_FAILED):
                    raise CheckpointError(f"Rank {rank}: {everyone[-1][1:].decode()}")
                found = decode(everyone[-1][1:], attempt.layout)
                theirs += [Piece(piece.name, piece.box, piece.lo, piece.hi) for piece in found]
        if self._memory is None or not all(data.startswith(_JOINS) for data in everyone):
            return None
        return self._share(self._memory, strips_of(theirs, attempt.layout), attempt.layout)

    def refuse(self, board: Board, attempt: str, reason: str) -> None:
        """Tell the ranks of the host that this one will write nothing of an attempt. Main thread, on a board of its."""
        if len(self._ranks) > 1:
            try:
                board.post(_key(attempt, self._rank), _FAILED + reason.encode())
            except LaunchError as lost:
                _log.error("the refusal of %s did not go out: %s", attempt, lost)

    def drop(self) -> None:
        """Have other memory for the next save: a rank that has failed may still write to this."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _share(self, memory: SharedMemory, strips: Strips, layout: Layout) -> Sharing | None:
        if not strips:
            return None
        try:
            memory.reach(shared_bytes(strips), index=self._ranks.index(self._rank), count=len(self._ranks))
        except OSError as error:  # the others count on this rank by now
            self._has_no_room = True
            raise CheckpointError(
                "There is no memory in which the ranks of this host could put columns together",
                expected=f"{shared_bytes(strips)} B",
                found=error.strerror,
                fix="The next save writes them row by row, which is slower.",
            ) from error
        return Sharing(memory, strips, layout, turn=self._ranks.index(self._rank) / len(self._ranks))

    def _meet(self, attempt: Attempt) -> None:
        """Have the memory of the host's first rank, made there if need be."""
        key = f"{_key(attempt.name, self._ranks[0])}/offer"
        if self._rank == self._ranks[0]:
            if self._memory is None:
                with contextlib.suppress(OSError):
                    self._memory = SharedMemory.make()
            self._post(key, b"" if self._memory is None else self._memory.address)
            return
        address = self._board.read(key, sender=f"rank {self._ranks[0]}")
        if self._memory is not None and self._memory.address != address:
            self.drop()
        if self._memory is None and address:
            self._memory = SharedMemory.open(address)
            if self._memory is None:
                _log.warning("the memory of rank %d cannot be shared, columns are written by row", self._ranks[0])

    def _post(self, key: str, data: bytes) -> None:
        self._board.post(key, data)
        self._posted.append(key)


def _key(attempt: str, rank: int) -> str:
    return f"strips/{attempt}/{rank}"
