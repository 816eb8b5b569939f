"""Writes a rank's chunks into the shared files and digests its pieces."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from reprise.commit.attempt import Attempt
from reprise.commit.messages import Message
from reprise.format.box import Image
from reprise.format.layout import PAGE_BYTES, FileLayout
from reprise.format.manifest import BLOCK_BYTES, DIGEST_BYTES
from reprise.saving.column_sharing import Stripes, cut_by_stripes
from reprise.saving.plan import Chunk, ChunkPart, Plan
from reprise.saving.snapshot import DIRECT_BYTES, Snapshot
from reprise.storage.files import MAX_OPEN_FILES, Files
from reprise.storage.worker import Stopped, run_together
from reprise.tensors.memory import Bytes, map_memory

# How many extents a rank writes concurrently, and how many of its threads are inside a write: the third digests its
# next chunk meanwhile, so the disk never waits. With two threads, which fall into step, 124M parameters took 1.10 times
# as long; with three in a write, or four threads, up to 1.07 times. A step may wait for each thread's chunk.
_THREADS, _WRITES = 3, 2
_THREAD = "checkpoint-writer"


@dataclass(slots=True, kw_only=True)
class Writer:
    """Writes a rank's chunks into an uncommitted folder, for a single save.

    Args:
        leads: Whether this rank creates every file, even those it writes no data to, and writes the headers.
        is_sparse: Whether files keep holes where other hosts write.
        stripes: By tensor, the stripes that assemble columns into whole rows. Columns elsewhere are written row by row.
    """

    attempt: Attempt
    plan: Plan
    snapshot: Snapshot
    leads: bool
    is_sparse: bool
    stripes: Stripes
    _targets: dict[str, _Target] = field(init=False, default_factory=dict)
    _digests: dict[str, bytearray] = field(init=False)
    _has_failed: threading.Event = field(init=False, default_factory=threading.Event)
    _turns: threading.Semaphore = field(init=False, default_factory=partial(threading.Semaphore, _WRITES))

    def write(self) -> Message:
        """Write this rank's chunks (and headers, on the leader), sync, and return the report with the pieces' digests.

        All writes precede the first sync: an optimizer step waits for a chunk, never for a sync.

        Raises:
            CheckpointError: The file system fails. The message shows path, errno and free space.
        """
        places, chunks = {file.name: file for file in self.attempt.layout.files}, self.plan.chunks
        files, folder = self.attempt.folder.files, self.attempt.partial
        shared = {self.attempt.layout.places[tensor].file for tensor in self.stripes}
        self._digests = {piece.name: bytearray() for piece in self.plan.pieces}
        with ExitStack() as ending:
            calls = list[Callable[[], None]]()
            for name in dict.fromkeys([*chunks, *places]):  # in write order
                if self.leads or name in chunks or name in shared:
                    begin, stays_open = partial(self._begin, places[name]), len(places) <= MAX_OPEN_FILES
                    target = self._targets[name] = _Target(folder / name, files, begin, stays_open)
                    ending.callback(target.close)
                    calls += [partial(self._write_extent, target, extent) for extent in chunks.get(name) or [[]]]
            # Never the folder itself: if that is gone, the save must fail. Nor may a thread that hung make it again.
            for path in {target.path.parent for target in self._targets.values()} - {folder}:
                with self._stopping_others(path):
                    files.make_folder(path)
            run_together(calls, name=_THREAD, threads=_THREADS)
            if self.stripes:
                run_together([self._write_stripes] * _WRITES, name=_THREAD, threads=_WRITES)
            files.sync_together([partial(self._sync, target) for target in self._targets.values()])
        written_bytes = sum(target.written_bytes for target in self._targets.values())
        return Message(number=written_bytes, payload=b"".join(self._digests.values()))

    def _begin(self, file: FileLayout, descriptor: int) -> None:
        """Reserve a new file's blocks and, on the leader, write its header."""
        files = self.attempt.folder.files
        files.reserve(descriptor, file.total_bytes, is_sparse=self.is_sparse)
        if self.leads:
            files.write(descriptor, memoryview(file.header), offset=0)

    @contextlib.contextmanager
    def _stopping_others(self, path: Path) -> Iterator[None]:
        """Stop the other threads if the block fails, and name the file in the error. After a failure, do not begin."""
        self._raise_if_failed()
        try:
            with self.attempt.writing(path):
                yield
        except BaseException:
            self._has_failed.set()
            raise

    def _raise_if_failed(self) -> None:
        """Raise if the save has failed: a late write would recreate the folder during or after its removal."""
        self.snapshot.check()
        if self._has_failed.is_set():
            raise Stopped

    def _write_extent(self, target: _Target, chunks: Sequence[Chunk]) -> None:
        with self._stopping_others(target.path):
            bounce = map_memory(max((chunk.size for chunk in chunks), default=0) + PAGE_BYTES)
            digest = xxhash.xxh3_64()  # the digest of the incomplete block
            with target:
                for chunk in chunks:
                    self._raise_if_failed()
                    self._write_chunk(target, chunk, bounce, digest)

    def _write_stripes(self) -> None:
        """Write full stripes, whichever ranks on the host filled them."""
        for tensor, stripes in self.stripes.items():
            place = self.attempt.layout.places[tensor]
            target = self._targets[place.file]
            for stripe in stripes:
                if (data := stripe.memory.claim(stripe)) is not None:
                    with self._stopping_others(target.path), target:
                        target.write(data, offset=place.offset + stripe.lo)

    def _sync(self, target: _Target) -> None:
        with self._stopping_others(target.path):
            target.sync()

    def _write_chunk(self, target: _Target, chunk: Chunk, bounce: Bytes, digest: xxhash.xxh3_64) -> None:
        try:
            data = self.snapshot.take(chunk, bounce)
            at = 0
            for part in chunk.parts:
                self._digest(part, data[at : at + part.hi - part.lo], digest)
                at += part.hi - part.lo
            if chunk.strided is None:
                with self._turns:
                    target.write(data, offset=chunk.offset)
            else:
                self._place_rows(target, chunk, chunk.strided, data)
        finally:
            self.snapshot.done(chunk)

    def _digest(self, part: ChunkPart, data: memoryview, digest: xxhash.xxh3_64) -> None:
        """Digest a piece's next bytes. A single thread adds them in order."""
        at, end = part.lo - part.piece.lo, part.piece.hi - part.piece.lo
        while data.nbytes:
            room = BLOCK_BYTES - at % BLOCK_BYTES
            block, data = data[:room], data[room:]
            digest.update(block)
            at += block.nbytes
            if at % BLOCK_BYTES == 0 or at == end:
                self._digests[part.piece.name] += digest.intdigest().to_bytes(DIGEST_BYTES, "big")
                digest.reset()

    def _place_rows(self, target: _Target, chunk: Chunk, packed: Image, data: memoryview) -> None:
        """Copy strided rows into the host's stripes. Write rows outside any stripe to the file, row by row."""
        (part,) = chunk.parts
        for lo, hi, stripe in cut_by_stripes(packed, part.lo, part.hi, self.stripes.get(part.piece.name, ())):
            rows = data[lo - part.lo : hi - part.lo]
            if stripe is not None:
                stripe.memory.put(stripe, packed, lo, rows)
                continue
            for in_tensor, in_image, length in packed.spans(lo, hi):
                row = rows[in_image - lo : in_image - lo + length]
                target.write(row, offset=chunk.offset + in_tensor, is_direct=False)


@dataclass(slots=True)
class _Target:
    """A file written by several threads in extents. It is open while any thread is inside its `with` block.

    Whole pages bypass the page cache (O_DIRECT) if file system and memory alignment allow it. Partial pages go through
    the cache, because other ranks may write the same page.

    Args:
        begin: Called with the descriptor when the file is first opened.
        stays_open: Whether to keep the file open until `close`, so `sync` reports every write-back error. False if a
            save has more files than a process may keep open.
    """

    path: Path
    files: Files
    begin: Callable[[int], None]
    stays_open: bool
    written_bytes: int = 0  # not counting the header
    _cached: int | None = None
    _direct: int | None = None  # None if the file system does not allow direct writes
    _users: int = 0
    _is_begun: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closing: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> None:
        """Open the file, unless it is already open."""
        with self._lock:
            self._users += 1
            if self._cached is None:
                self._cached = cached = self.files.open_for_writing(self.path)
                self._closing.callback(self.files.close, cached)
                self._direct = direct = self.files.open_direct(self.path)
                if direct is not None:
                    self._closing.callback(self.files.close, direct)
                if not self._is_begun:
                    self.begin(cached)
                    self._is_begun = True

    def __exit__(self, *_: object) -> None:
        """Close the file if no other thread uses it."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and not self.stays_open:
                self.close()

    def sync(self) -> None:
        """Sync the file to the disk and close it."""
        with self:
            assert self._cached is not None
            self.files.sync(self._cached)
        self.close()

    def close(self) -> None:
        """Close the open descriptors."""
        self._cached = self._direct = None
        self._closing.close()

    def write(self, data: memoryview, *, offset: int, is_direct: bool = True) -> None:
        """Write `data` at `offset`.

        Args:
            is_direct: Whether whole pages bypass the page cache, if the file system allows it.
        """
        lo = -offset % PAGE_BYTES
        hi = (offset + data.nbytes) // PAGE_BYTES * PAGE_BYTES - offset
        direct, cached = self._direct, self._cached
        assert cached is not None
        parts = [(0, data)]  # written through the page cache, with offsets in `data`
        pages = data[lo:hi]
        is_aligned = lo < hi and np.frombuffer(pages, np.uint8).ctypes.data % DIRECT_BYTES == 0
        if is_direct and is_aligned and direct is not None:
            try:
                self.files.write(direct, pages, offset=offset + lo)
                parts = [(0, data[:lo]), (hi, data[hi:])]
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = None  # not closed here: another thread may be writing to it
        for at, part in parts:
            if part.nbytes:
                self.files.write(cached, part, offset=offset + at)
        with self._lock:
            self.written_bytes += data.nbytes
