"""Writes one rank's chunks into the shared files and computes the digests of its pieces."""

from __future__ import annotations

import errno
import resource
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from reprise.errors import CheckpointError
from reprise.format.box import Image
from reprise.format.layout import PAGE_BYTES, FileLayout, Layout
from reprise.format.manifest import BLOCK_BYTES, DIGEST_BYTES, Written, WrittenPiece
from reprise.saving.column_sharing import Sharing, cut_by_stripes
from reprise.saving.plan import Chunk, ChunkPart, Piece
from reprise.saving.snapshot import DIRECT_BYTES, Snapshot
from reprise.storage.files import MOST_OPEN, Files, describe_free_space
from reprise.storage.worker import Stopped, run_together
from reprise.tensors.memory import Bytes, map_memory

# Extents that a rank writes concurrently: one is digested while another is on its way to the disk, even if ranks share
# a core. 2 ranks at zero3 took 1.32 times as long as a plain write with one thread each, and 1.0 times with two. More
# threads gain nothing on a local disk, and each holds a chunk that an optimizer step may wait for.
THREADS = 2
_THREAD = "checkpoint-writer"


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes one rank's chunks into a folder not committed yet.

    Args:
        threads: number of extents written concurrently.
        progress: called from any writer thread with the number of bytes just written.
        leads: whether this rank writes the headers; it makes every file, whether or not it writes data to it.
        is_sparse: whether the files keep holes where other hosts write.
        sharing: assembles columns into whole rows; None writes them row by row.
    """

    folder: Path
    files: Files
    layout: Layout
    threads: int
    progress: Callable[[int], None]
    leads: bool = True
    is_sparse: bool = False
    sharing: Sharing | None = None

    def write(
        self,
        pieces: Sequence[Piece],
        chunks: Mapping[str, Sequence[Sequence[Chunk]]],
        snapshot: Snapshot,
    ) -> Written:
        """Write this rank's chunks and, on the leader, the headers, then sync; return the pieces with their digests.

        All writes precede the first sync: an optimizer step waits for a chunk, and never for a sync.

        Args:
            chunks: the extents of each file, in the order of writing.

        Raises:
            CheckpointError: with path, errno and free space, if the file system fails.
        """
        files = {file.name: file for file in self.layout.files}
        order = [files[name] for name in dict.fromkeys([*chunks, *files])]
        digests, has_failed = dict[str, bytes](), threading.Event()
        with ExitStack() as ending:
            calls, targets = list[Callable[[], None]](), dict[str, _Target]()
            shared = set() if self.sharing is None else self.sharing.files
            for file in order:
                if not self.leads and file.name not in chunks and file.name not in shared:
                    continue
                target = targets[file.name] = _Target(self, file, stays_open=len(order) <= MOST_OPEN)
                ending.callback(target.close)
                calls += [
                    partial(self._write_extent, target, extent, snapshot, digests, has_failed)
                    for extent in chunks.get(file.name, ()) or ((),)
                ]
            run_together(calls, name=_THREAD, threads=self.threads)
            if self.sharing is not None:
                stripes = partial(self._write_stripes, self.sharing, targets, snapshot, has_failed)
                run_together([stripes] * self.threads, name=_THREAD, threads=self.threads)
            self.files.sync_together([partial(self._sync, target) for target in targets.values()])
        return Written(
            [WrittenPiece(piece.name, piece.box, piece.lo, piece.hi, digests[piece.name]) for piece in pieces],
            sum(target.written_bytes for target in targets.values()),
        )

    def _write_extent(
        self,
        target: _Target,
        chunks: Sequence[Chunk],
        snapshot: Snapshot,
        digests: dict[str, bytes],
        has_failed: threading.Event,
    ) -> None:
        computed = PieceDigests()
        try:
            bounce = map_memory(max((chunk.size for chunk in chunks), default=0) + PAGE_BYTES)
            self._go_on(snapshot, has_failed)
            with target:
                for chunk in chunks:
                    self._go_on(snapshot, has_failed)
                    self._write_chunk(target, chunk, snapshot=snapshot, bounce=bounce, digests=computed)
            digests.update(computed.all())
        except OSError as error:
            has_failed.set()
            raise self._failure(target.path, error) from error
        except BaseException:
            has_failed.set()
            raise

    def _write_stripes(
        self, sharing: Sharing, targets: Mapping[str, _Target], snapshot: Snapshot, has_failed: threading.Event
    ) -> None:
        """Write full stripes, filled by any rank of the host."""
        for tensor, stripe, data in sharing.full():
            self._go_on(snapshot, has_failed)
            place = self.layout.places[tensor]
            target = targets[place.file]
            try:
                with target:
                    target.write(data, offset=place.offset + stripe.lo)
            except OSError as error:
                has_failed.set()
                raise self._failure(target.path, error) from error

    def _sync(self, target: _Target) -> None:
        try:
            target.sync()
        except OSError as error:
            raise self._failure(target.path, error) from error

    def _go_on(self, snapshot: Snapshot, has_failed: threading.Event) -> None:
        """Stop if the save has failed: a late write would recreate the folder during its removal."""
        snapshot.check()
        if has_failed.is_set():
            raise Stopped

    def _write_chunk(
        self, target: _Target, chunk: Chunk, *, snapshot: Snapshot, bounce: Bytes, digests: PieceDigests
    ) -> None:
        try:
            data = snapshot.take(chunk, bounce)
            at = 0
            for part in chunk.parts:
                digests.add(part, data[at : at + part.hi - part.lo])
                at += part.hi - part.lo
            if chunk.strided is None:
                target.write(data, offset=chunk.offset)
            else:
                self._place_rows(target, chunk, chunk.strided, data)
        finally:
            snapshot.done(chunk)
        self.progress(chunk.size)

    def _place_rows(self, target: _Target, chunk: Chunk, packed: Image, data: memoryview) -> None:
        """Copy strided rows into the stripes of the host; write rows outside any stripe to the file, row by row."""
        (part,) = chunk.parts
        stripes = () if self.sharing is None else self.sharing.stripes(part.piece.name)
        for lo, hi, stripe in cut_by_stripes(packed, part.lo, part.hi, stripes):
            rows = data[lo - part.lo : hi - part.lo]
            if stripe is not None and self.sharing is not None:
                self.sharing.put(stripe, packed, lo, rows)
                continue
            for in_tensor, in_image, length in packed.spans(lo, hi):
                row = rows[in_image - lo : in_image - lo + length]
                target.write(row, offset=chunk.offset + in_tensor, is_direct=False)

    def _failure(self, path: Path, error: OSError) -> CheckpointError:
        return writing_failed(path, error, self.files, root=self.folder.parent, total_bytes=self.layout.total_bytes)


def writing_failed(path: Path, error: OSError, files: Files, *, root: Path, total_bytes: int) -> CheckpointError:
    """Return the error for a failed write to `path`, a file of a checkpoint of `total_bytes` in `root`."""
    problem = f"Writing a checkpoint failed: {error.strerror} (errno {error.errno})"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return CheckpointError(
            problem,
            where=path,
            expected="a free file descriptor",
            found=f"a limit of {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} open files in this process",
            fix="Committed checkpoints are untouched; raise the limit of open files with `ulimit -n`.",
        )
    return CheckpointError(
        problem,
        where=path,
        expected=f"room for {total_bytes} B",
        found=describe_free_space(files, root),
        fix="Committed checkpoints are untouched; free space or repair the disk.",
    )


class _Target:
    """A file written in extents by several threads; open while any of them is inside its `with`.

    Whole pages bypass the page cache (O_DIRECT) where file system and memory alignment allow it. Partial pages go
    through the cache, because the rest of the page may belong to another rank.

    Args:
        stays_open: keep the file open until `close`, for `sync` to report every write-back error of the page cache.
            False where a save has more files than a process may keep open.
    """

    def __init__(self, writer: Writer, file: FileLayout, *, stays_open: bool) -> None:
        self._stays_open = stays_open
        self.path = writer.folder / file.name
        self._folder, self._files, self._file = writer.folder, writer.files, file
        self._writes_header, self._is_sparse = writer.leads, writer.is_sparse
        self._lock = threading.Lock()
        self._users = 0
        self._cached: int | None = None
        self._direct: int | None = None
        self._refuses_direct = False  # set if the first direct write fails with EINVAL
        self._is_begun = self._is_reserved = False
        self.written_bytes = 0  # without the header

    def __enter__(self) -> None:
        """Open the file. The first time, also reserve its blocks and, on the leader, write its header."""
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
        if self._is_begun and not self._is_reserved:
            raise Stopped
        if not self._is_begun:
            self._is_begun = True
            self._files.make_folder(self._folder)  # never its parent: if that is gone, the save must fail
            if self.path.parent != self._folder:
                self._files.make_folder(self.path.parent)
        self._cached = self._files.open_for_writing(self.path)
        self._direct = None if self._refuses_direct else self._files.open_direct(self.path)
        if not self._is_reserved:
            if self._is_sparse:
                self._files.extend(self._cached, self._file.total_bytes)
            else:
                self._files.reserve(self._cached, self._file.total_bytes)
            if self._writes_header:
                self._files.write(self._cached, [memoryview(self._file.header)], offset=0)
            self._is_reserved = True

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
            is_direct: write whole pages around the page cache, unless the file system refuses direct writes.
        """
        lo = -offset % PAGE_BYTES
        hi = (offset + data.nbytes) // PAGE_BYTES * PAGE_BYTES - offset
        direct, cached = self._direct if is_direct else None, self._cached
        assert cached is not None
        parts = [(0, data)]  # through the page cache, each behind its offset in `data`
        if lo < hi and direct is not None and not self._refuses_direct and _is_aligned(data[lo:hi]):
            try:
                self._files.write(direct, [data[lo:hi]], offset=offset + lo)
                parts = [(0, data[:lo]), (hi, data[hi:])]
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._refuses_direct = True  # another thread may be writing to it: it stays open until nobody does
        for at, part in parts:
            if part.nbytes:
                self._files.write(cached, [part], offset=offset + at)
        with self._lock:
            self.written_bytes += data.nbytes


def _is_aligned(pages: memoryview) -> bool:
    """Return whether O_DIRECT may write from this memory."""
    return np.frombuffer(pages, np.uint8).ctypes.data % DIRECT_BYTES == 0


class PieceDigests:
    """Computes the digests of pieces whose bytes are added in order, one piece after the other."""

    def __init__(self) -> None:
        self._found: dict[str, list[bytes]] = {}
        self._open = xxhash.xxh3_64()

    def add(self, part: ChunkPart, data: memoryview) -> None:
        """Digest the bytes of the next part."""
        at, end = part.lo - part.piece.lo, part.piece.hi - part.piece.lo
        digests = self._found.setdefault(part.piece.name, [])
        while data.nbytes:
            room = BLOCK_BYTES - at % BLOCK_BYTES
            block, data = data[:room], data[room:]
            self._open.update(block)
            at += block.nbytes
            if at % BLOCK_BYTES == 0 or at == end:
                digests.append(self._open.intdigest().to_bytes(DIGEST_BYTES, "big"))
                self._open.reset()

    def all(self) -> dict[str, bytes]:
        """Return the digests of each piece's blocks, packed, by name."""
        return {name: b"".join(digests) for name, digests in self._found.items()}
