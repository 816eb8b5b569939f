"""The checkpoint engine's file system calls."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from reprise.errors import CheckpointError
from reprise.storage.paths import MAX_BYTES, is_dir, is_symlink, open_regular
from reprise.storage.worker import run_together

T = TypeVar("T")
Result = TypeVar("Result")

# fallocate(2) through ctypes: glibc's posix_fallocate falls back to reading and rewriting a byte in every block, which
# zeroes what another rank writes meanwhile.
_libc = ctypes.CDLL(None, use_errno=True)
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTTY}
_BLOCK_BYTES = 512  # the unit of st_blocks, stat(2), whatever the file system's block size is
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE, fallocate(2)
# A sync waits for the disk's journal, and concurrent syncs share a journal commit: on a busy ext4, five in turn took
# 27 ms, five on three threads 4 ms, and more threads gained nothing.
_SYNC_THREADS = 3
# How many files a rank keeps open at once. Each takes two descriptors; the usual limit per process is 1024.
MAX_OPEN_FILES = 64


class Files:
    """The file system, with a method per kind of call. Tests can count, fail or kill at any."""

    # How many threads fill tensors from these files. None for a thread per core, up to a few.
    reading_threads: int | None = None
    # How many bytes are read between two updates of a digest: few enough to stay in a core's cache. Two threads took
    # 0.65 of one plain read of the page cache, and 0.75 with a digest after the whole block.
    step_bytes = 512 << 10

    def write(self, descriptor: int, data: memoryview, *, offset: int) -> None:
        """Write all bytes of `data` at `offset`."""
        while data.nbytes:
            count = os.pwritev(descriptor, [data], offset)
            data, offset = data[count:], offset + count

    def sync(self, descriptor: int) -> None:
        """Make a file's data and size durable."""
        os.fsync(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def write_new(self, path: Path, data: bytes) -> int:
        """Write a new file and return its open descriptor. Its content is durable after `sync`."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            self.write(descriptor, memoryview(data), offset=0)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def write_whole(self, path: Path, data: bytes) -> None:
        """Write a new file and make its content durable. Its name is durable after `sync_folder`."""
        descriptor = self.write_new(path, data)
        try:
            self.sync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename, replacing any file with the target's name."""
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        """Remove a folder and its contents, or a file. It may be missing."""
        if is_dir(path) and not is_symlink(path):
            shutil.rmtree(path, onerror=_ignore_missing)
        else:
            path.unlink(missing_ok=True)

    def make_folder(self, path: Path) -> None:
        """Create `path`, unless it exists. Its parent must exist."""
        path.mkdir(exist_ok=True)

    def open_for_writing(self, path: Path) -> int:
        """Open a shared file for writing, as several ranks do at once. Create it if missing, never truncate it."""
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    def open_direct(self, path: Path) -> int | None:
        """Open an existing shared file for direct I/O, bypassing the page cache. None if it is not supported.

        Offsets, sizes and addresses must be block aligned. Some file systems refuse only the first write.
        """
        with contextlib.suppress(OSError):
            return os.open(path, os.O_WRONLY | os.O_DIRECT)
        return None

    def sync_together(self, syncs: Sequence[Callable[[], None]]) -> None:
        """Run `sync` and `sync_folder` calls concurrently, and raise the first error."""
        run_together(syncs, name="checkpoint-sync", threads=_SYNC_THREADS)

    def open_for_reading(self, path: Path) -> int:
        """Open a regular file for reading."""
        return open_regular(path)

    def reopen(self, descriptor: int, path: Path) -> None:
        """Reopen an open file under the same descriptor, since a stale handle stays stale."""
        fresh = self.open_for_reading(path)
        try:
            os.dup2(fresh, descriptor, inheritable=False)
        finally:
            self.close(fresh)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def reserve(self, descriptor: int, total_bytes: int, *, is_sparse: bool = False) -> None:
        """Extend a file to its final size and, if the file system can, reserve its blocks. Its content stays.

        Args:
            is_sparse: Whether to reserve no blocks. Ranges never written stay holes.

        Raises:
            OSError: There are not enough blocks (ENOSPC, EDQUOT or EFBIG).
        """
        while not is_sparse and _libc.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(total_bytes)) != 0:
            code = ctypes.get_errno()
            if code in _UNSUPPORTED:
                break
            if code != errno.EINTR:  # otherwise a signal interrupted the call
                raise OSError(code, os.strerror(code))
        if os.fstat(descriptor).st_size < total_bytes:
            os.ftruncate(descriptor, total_bytes)

    def read(self, descriptor: int, buffer: memoryview, *, offset: int) -> int:
        """Fill `buffer` from `offset` and return the byte count, which is smaller only at the end."""
        filled = 0
        while filled < buffer.nbytes:
            count = os.preadv(descriptor, [buffer[filled:]], offset + filled)
            if count == 0:
                break
            filled += count
        return filled

    def read_whole(self, path: Path) -> bytes:
        """Return a file's content.

        Raises:
            OSError: The file is missing, not a regular file, or larger than `MAX_BYTES` (EFBIG).
        """
        size = self.size(path)
        if size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"larger than {MAX_BYTES} B", str(path))
        data = bytearray(size)
        descriptor = self.open_for_reading(path)
        try:
            return bytes(data[: self.read(descriptor, memoryview(data), offset=0)])
        finally:
            self.close(descriptor)

    def map(self, call: Callable[[T], Result], items: Iterable[T]) -> Iterable[Result]:
        """Return each item's result from a reading call, in order. A store makes several calls at once."""
        return map(call, items)

    def end(self) -> None:
        """Release resources for reading other than open files. The next call acquires them again."""

    def size(self, path: Path) -> int:
        """Return a regular file's size in bytes.

        Raises:
            OSError: The file is missing, or not a regular file (a link, a folder, a device).
        """
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return status.st_size

    def tree(self, path: Path, folders: Collection[str] | None = None) -> dict[str, os.stat_result]:
        """Return the status for each file below a folder, by relative name. A link counts as a file.

        Args:
            folders: The folders below it to list, by relative name: others may be huge, or closed to this user. None
                lists all.
        """
        statuses, children = dict[str, os.stat_result](), [*path.iterdir()]
        for child in children:
            name = str(child.relative_to(path))
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile, as a hold may be
                status = child.lstat()
                if not stat.S_ISDIR(status.st_mode):
                    statuses[name] = status
                elif folders is None or name in folders:
                    children += child.iterdir()
        return statuses

    def free_bytes(self, path: Path) -> int | None:
        """Return the bytes an unprivileged user may still write to the path's file system.

        None if the file system does not report it: some network and FUSE file systems report 0 blocks in total.
        """
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize if status.f_blocks else None

    def allocated_bytes(self, path: Path) -> int:
        """Return the bytes allocated to all files below `path`."""
        return _BLOCK_BYTES * sum(status.st_blocks for status in self.tree(path).values()) if is_dir(path) else 0


def _ignore_missing(_function: object, _path: str, error: tuple[type[BaseException], BaseException, object]) -> None:
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


# This machine's file system, which entry points use by default.
FILE_SYSTEM = Files()


def describe_free_space(files: Files, path: Path) -> str:
    """Describe how much space is left on the path's file system."""
    try:
        free, status = files.free_bytes(path), os.statvfs(path)
        room = "an unknown number of bytes free" if free is None else f"{free} B free"
        is_full = status.f_files > 0 and status.f_favail == 0
        return f"no inodes left, so no file can be created; {room}" if is_full else room
    except OSError as error:
        return f"free space unknown: {error.strerror}"


def cannot_write(
    path: Path,
    error: OSError,
    *,
    what: str = "The checkpoint folder",
    files: Files = FILE_SYSTEM,
    another: str = "another folder",
    room: int | None = None,
) -> CheckpointError:
    """Return the error for a folder or file, `what`, which could not be written or created.

    Args:
        path: The path, if `error` does not name it.
        another: What the user should name to write elsewhere.
        room: How many bytes are being written. Then the free space is shown whatever the error.
    """
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    fix = "Make room there" if is_full else "Correct the path, its permissions or the file system"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        fix, room = "Raise the open file limit with `ulimit -n`", None
    return CheckpointError(
        f"{what} cannot be written: {error.strerror} (errno {error.errno})",
        where=error.filename2 or error.filename or path,
        expected=f"room for {room} B" if room else None,
        found=describe_free_space(files, path.parent) if is_full or room else None,
        fix=f"{fix}, or name {another}.",
    )


def keep_block(descriptor: int) -> None:
    """Reserve an empty file's first block, so a later small write succeeds even on a full disk.

    The file stays empty. Without fallocate in the file system, nothing happens.
    """
    _libc.fallocate(descriptor, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(_BLOCK_BYTES))
