"""Writes a rank's chunks into the shared files and digests its pieces."""

from __future__ import annotations

import contextlib
import errno
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from reprise.errors import CheckpointError
from reprise.format.box import Image
from reprise.format.layout import PAGE_BYTES, FileLayout, Layout
from reprise.format.manifest import BLOCK_BYTES, DIGEST_BYTES, Written, WrittenPiece
from reprise.saving.column_sharing import Sharing, cut_by_stripes
from reprise.saving.plan import Chunk, ChunkPart, Plan
from reprise.saving.snapshot import DIRECT_BYTES, Snapshot
from reprise.storage.files import MAX_OPEN_FILES, Files, describe_free_space
from reprise.storage.worker import Stopped, run_together
from reprise.tensors.memory import Bytes, map_memory

# How many extents a rank writes concurrently: it digests the first while the second goes to disk, even if ranks share a
# core. 2 ranks at zero3 took 1.32 times as long as a plain write with one thread each, and 1.0 times with two. More
# threads gain nothing on a local disk, and an optimizer step may wait for each thread's chunk.
_THREADS = 2
_THREAD = "checkpoint-writer"


class Writer:
    """Writes a rank's chunks into an uncommitted folder, for a single save.

    Args:
        progress: Called from any writer thread with the byte count just written.
        leads: Whether this rank creates every file, even those it writes no data to, and writes the headers.
        is_sparse: Whether files keep holes where other hosts write.
        sharing: Assembles columns into whole rows. None writes columns row by row.
    """

    def __init__(
        self,
        folder: Path,
        files: Files,
        layout: Layout,
        snapshot: Snapshot,
        *,
        progress: Callable[[int], None],
        leads: bool,
        is_sparse: bool,
        sharing: Sharing | None,
    ) -> None:
        self._folder, self._files, self._layout, self._snapshot = folder, files, layout, snapshot
        self._progress, self._leads, self._sharing = progress, leads, sharing
        self._prepare = files.extend if is_sparse else files.reserve
        self._targets: dict[str, _Target] = {}
        self._digests: dict[str, bytearray] = {}
        self._has_failed = threading.Event()

    def write(self, plan: Plan) -> Written:
        """Write this rank's chunks (and headers, on the leader), sync, and return the pieces with their digests.

        All writes precede the first sync: an optimizer step waits for a chunk, never for a sync.

        Raises:
            CheckpointError: The file system fails. The message shows path, errno and free space.
        """
        files = {file.name: file for file in self._layout.files}
        names = list(dict.fromkeys([*plan.chunks, *files]))  # in write order
        self._digests = {piece.name: bytearray() for piece in plan.pieces}
        with ExitStack() as ending:
            calls = list[Callable[[], None]]()
            for name in names:
                if self._leads or name in plan.chunks or (self._sharing is not None and name in self._sharing.files):
                    target = self._targets[name] = _Target(
                        self._folder / name,
                        self._files,
                        partial(self._begin, files[name]),
                        stays_open=len(names) <= MAX_OPEN_FILES,
                    )
                    ending.callback(target.close)
                    calls += [partial(self._write_extent, target, extent) for extent in plan.chunks.get(name) or [[]]]
            self._raise_if_failed()  # a thread that hung must not recreate an aborted attempt's folder
            # Never the folder's parent: if that is gone, the save must fail.
            for path in dict.fromkeys([self._folder, *(target.path.parent for target in self._targets.values())]):
                with self._stopping_others(path):
                    self._files.make_folder(path)
            run_together(calls, name=_THREAD, threads=_THREADS)
            if self._sharing is not None:
                calls = [partial(self._write_stripes, self._sharing)] * _THREADS
                run_together(calls, name=_THREAD, threads=_THREADS)
            self._files.sync_together([partial(self._sync, target) for target in self._targets.values()])
        return Written(
            [WrittenPiece(p.name, p.box, p.lo, p.hi, bytes(self._digests[p.name])) for p in plan.pieces],
            sum(target.written_bytes for target in self._targets.values()),
        )

    def _begin(self, file: FileLayout, descriptor: int) -> None:
        """Reserve a new file's blocks and, on the leader, write its header."""
        self._prepare(descriptor, file.total_bytes)
        if self._leads:
            self._files.write(descriptor, [memoryview(file.header)], offset=0)

    @contextlib.contextmanager
    def _stopping_others(self, path: Path) -> Iterator[None]:
        """Stop the other threads if the block fails, and name the file in the error."""
        try:
            yield
        except OSError as error:
            self._has_failed.set()
            total_bytes, root = self._layout.total_bytes, self._folder.parent
            raise writing_failed(path, error, self._files, root=root, total_bytes=total_bytes) from error
        except BaseException:
            self._has_failed.set()
            raise

    def _raise_if_failed(self) -> None:
        """Raise if the save has failed: a late write would recreate the folder during its removal."""
        self._snapshot.check()
        if self._has_failed.is_set():
            raise Stopped

    def _write_extent(self, target: _Target, chunks: Sequence[Chunk]) -> None:
        with self._stopping_others(target.path):
            bounce = map_memory(max((chunk.size for chunk in chunks), default=0) + PAGE_BYTES)
            digest = xxhash.xxh3_64()  # the digest of the incomplete block
            self._raise_if_failed()
            with target:
                for chunk in chunks:
                    self._raise_if_failed()
                    self._write_chunk(target, chunk, bounce, digest)

    def _write_stripes(self, sharing: Sharing) -> None:
        """Write full stripes, whichever ranks on the host filled them."""
        for tensor, stripe, data in sharing.full():
            place = self._layout.places[tensor]
            target = self._targets[place.file]
            with self._stopping_others(target.path):
                self._raise_if_failed()
                with target:
                    target.write(data, offset=place.offset + stripe.lo)

    def _sync(self, target: _Target) -> None:
        with self._stopping_others(target.path):
            target.sync()

    def _write_chunk(self, target: _Target, chunk: Chunk, bounce: Bytes, digest: xxhash.xxh3_64) -> None:
        try:
            data = self._snapshot.take(chunk, bounce)
            at = 0
            for part in chunk.parts:
                self._digest(part, data[at : at + part.hi - part.lo], digest)
                at += part.hi - part.lo
            if chunk.strided is None:
                target.write(data, offset=chunk.offset)
            else:
                self._place_rows(target, chunk, chunk.strided, data)
        finally:
            self._snapshot.done(chunk)
        self._progress(chunk.size)

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
        stripes = () if self._sharing is None else self._sharing.stripes(part.piece.name)
        for lo, hi, stripe in cut_by_stripes(packed, part.lo, part.hi, stripes):
            rows = data[lo - part.lo : hi - part.lo]
            if stripe is not None and self._sharing is not None:
                self._sharing.put(stripe, packed, lo, rows)
                continue
            for in_tensor, in_image, length in packed.spans(lo, hi):
                row = rows[in_image - lo : in_image - lo + length]
                target.write(row, offset=chunk.offset + in_tensor, is_direct=False)


def writing_failed(path: Path, error: OSError, files: Files, *, root: Path, total_bytes: int) -> CheckpointError:
    """Return the error for a failed write to `path`, part of a `total_bytes` checkpoint in `root`."""
    problem = f"Writing a checkpoint failed: {error.strerror} (errno {error.errno})"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return CheckpointError(
            problem,
            where=path,
            expected="a free file descriptor",
            found=f"a limit of {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} open files in this process",
            fix="Committed checkpoints are untouched. Raise the open file limit with `ulimit -n`.",
        )
    return CheckpointError(
        problem,
        where=path,
        expected=f"room for {total_bytes} B",
        found=describe_free_space(files, root),
        fix="Committed checkpoints are untouched. Free space or repair the disk.",
    )


class _Target:
    """A file written by several threads in extents. It is open while any thread is inside its `with` block.

    Whole pages bypass the page cache (O_DIRECT) if file system and memory alignment allow it. Partial pages go through
    the cache, because other ranks may write the same page.

    Args:
        begin: Called with the descriptor when the file is first opened.
        stays_open: Whether to keep the file open until `close`, so `sync` reports every write-back error. False if a
            save has more files than a process may keep open.
    """

    def __init__(self, path: Path, files: Files, begin: Callable[[int], None], *, stays_open: bool) -> None:
        self.path, self._files, self._begin, self._stays_open = path, files, begin, stays_open
        self._lock = threading.Lock()
        self._users = 0
        self._cached: int | None = None
        self._direct: int | None = None
        self._refuses_direct = False  # set if the first direct write fails with EINVAL
        self._is_begun = False
        self.written_bytes = 0  # not counting the header

    def __enter__(self) -> None:
        """Open the file, unless it is already open."""
        with self._lock:
            if self._cached is None:
                try:
                    self._open()
                except BaseException:
                    self.close()
                    raise
            self._users += 1

    def __exit__(self, *_: object) -> None:
        """Close the file if no other thread uses it."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and not self._stays_open:
                self.close()

    def sync(self) -> None:
        """Sync the file to the disk and close it."""
        if self._cached is None:
            self._cached = self._files.open_for_writing(self.path)
        self._files.sync(self._cached)
        self.close()

    def _open(self) -> None:
        self._cached = self._files.open_for_writing(self.path)
        self._direct = None if self._refuses_direct else self._files.open_direct(self.path)
        if not self._is_begun:
            self._begin(self._cached)
            self._is_begun = True

    def close(self) -> None:
        """Close the open descriptors."""
        descriptors = (self._cached, self._direct)
        self._cached = self._direct = None
        with ExitStack() as ending:
            for descriptor in descriptors:
                if descriptor is not None:
                    ending.callback(self._files.close, descriptor)

    def write(self, data: memoryview, *, offset: int, is_direct: bool = True) -> None:
        """Write `data` at `offset`.

        Args:
            is_direct: Whether whole pages bypass the page cache, if the file system allows it.
        """
        lo = -offset % PAGE_BYTES
        hi = (offset + data.nbytes) // PAGE_BYTES * PAGE_BYTES - offset
        direct, cached = None if self._refuses_direct else self._direct, self._cached
        assert cached is not None
        parts = [(0, data)]  # written through the page cache, with offsets in `data`
        if is_direct and lo < hi and direct is not None and _is_aligned(data[lo:hi]):
            try:
                self._files.write(direct, [data[lo:hi]], offset=offset + lo)
                parts = [(0, data[:lo]), (hi, data[hi:])]
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._refuses_direct = True  # not closed here: another thread may be writing to it
        for at, part in parts:
            if part.nbytes:
                self._files.write(cached, [part], offset=offset + at)
        with self._lock:
            self.written_bytes += data.nbytes


def _is_aligned(pages: memoryview) -> bool:
    """Return whether O_DIRECT may write from this memory."""
    return np.frombuffer(pages, np.uint8).ctypes.data % DIRECT_BYTES == 0
