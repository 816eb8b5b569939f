"""Every call that the engine makes to the file system. What is written where, and in which order, is told elsewhere."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from trainer.errors import CheckpointError
from trainer.regular_file import open_regular

# fallocate(2) through ctypes: glibc's posix_fallocate falls back to reading and rewriting a byte of every block, which
# zeroes what another rank wrote meanwhile.
_libc = ctypes.CDLL(None, use_errno=True)
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTTY}
_MOST_BUFFERS = 512  # POSIX promises only 16 (IOV_MAX), Linux has 1024
_BLOCK_BYTES = 512  # the unit of st_blocks, stat(2), whatever the file system's blocks are
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE, fallocate(2)


class Files:
    """The file system. One method per kind of call, so that a test can count, fail or kill at each."""

    def make_folder(self, path: Path) -> None:
        """Make `path`, in a folder that must be there; being there already is fine."""
        path.mkdir(exist_ok=True)

    def open_for_writing(self, path: Path) -> int:
        """Open a shared file for writing, made if it is not there, never truncated; several ranks do this at once."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def open_direct(self, path: Path) -> int | None:
        """Open a shared file that is there for writing around the page cache; None where its file system cannot.

        Offsets, sizes and addresses are then bound to whole blocks; some file systems say so with the first write.
        """
        try:
            return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            return None

    def open_for_reading(self, path: Path) -> int:
        """Open a file for reading; a link is refused, as `size` refuses it."""
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def reserve(self, descriptor: int, total_bytes: int) -> None:
        """Give a file its final size and, where the file system can, its blocks, leaving what is written as it is.

        Raises:
            OSError: ENOSPC, EDQUOT or EFBIG where the blocks are not to be had.
        """
        code = errno.EINTR
        while code == errno.EINTR:  # a signal came while blocks were being found
            if _libc.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(total_bytes)) == 0:
                return
            code = ctypes.get_errno()
        if code not in _UNSUPPORTED:
            raise OSError(code, os.strerror(code))
        if os.fstat(descriptor).st_size < total_bytes:
            os.ftruncate(descriptor, total_bytes)

    def write(self, descriptor: int, buffers: Sequence[memoryview], *, offset: int) -> None:
        """Write `buffers`, one behind the other, at `offset`, all of them."""
        queue = [buffer for buffer in buffers if buffer.nbytes]
        first = 0
        while first < len(queue):
            written = os.pwritev(descriptor, queue[first : first + _MOST_BUFFERS], offset)
            offset += written
            while first < len(queue) and written >= queue[first].nbytes:
                written -= queue[first].nbytes
                first += 1
            if written:
                queue[first] = queue[first][written:]

    def read(self, descriptor: int, buffer: memoryview, *, offset: int) -> int:
        """Fill `buffer` from `offset`; return how many bytes there were, fewer only at the end of the file."""
        filled = 0
        while filled < buffer.nbytes:
            count = os.preadv(descriptor, [buffer[filled:]], offset + filled)
            if count == 0:
                break
            filled += count
        return filled

    def sync(self, descriptor: int) -> None:
        """Make a file's data and size durable."""
        os.fsync(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def write_whole(self, path: Path, data: bytes) -> None:
        """Write a new file and make its content durable; its name is durable after `sync_folder`."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            self.write(descriptor, [memoryview(data)], offset=0)
            self.sync(descriptor)
        finally:
            os.close(descriptor)

    def mark(self, path: Path) -> None:
        """Make an empty file that other hosts are to see, and that a power failure may take."""
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))

    def rename(self, source: Path, target: Path) -> None:
        """Rename, replacing a file of the target's name."""
        os.rename(source, target)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and all in it; being gone already is fine."""
        shutil.rmtree(path, ignore_errors=False, onerror=_ignore_missing)

    def remove_file(self, path: Path) -> None:
        """Remove a file; being gone already is fine."""
        path.unlink(missing_ok=True)

    def size(self, path: Path) -> int:
        """Return a regular file's size in bytes.

        Raises:
            OSError: if it is missing, or no regular file (a link, a folder, a device).
        """
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return status.st_size

    def is_folder(self, path: Path) -> bool:
        """Return whether `path`, which is there, is a folder itself and no link to one."""
        return stat.S_ISDIR(os.lstat(path).st_mode)

    def free_bytes(self, path: Path) -> int | None:
        """Return how many bytes an ordinary user may still write to the file system of `path`.

        None where the file system does not say: some network and FUSE file systems report a size of 0 blocks.
        """
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize if status.f_blocks else None

    def free_inodes(self, path: Path) -> int | None:
        """Return how many more files the file system of `path` can hold; None where it has no such limit."""
        status = os.statvfs(path)
        return status.f_favail if status.f_files else None

    def allocated_bytes(self, path: Path) -> int:
        """Return how many bytes of the file system the files below `path` take; 0 where there are none."""
        paths = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
        return sum(os.lstat(file).st_blocks * _BLOCK_BYTES for file in paths)


def _ignore_missing(_function: object, _path: str, error: tuple[type[BaseException], BaseException, object]) -> None:
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


def read_small(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file, at most so many bytes of it. Waits for nobody: a pipe is refused.

    Raises:
        OSError: if it is missing, cannot be read, or is no regular file.
    """
    descriptor = open_regular(path)
    try:
        return os.pread(descriptor, most_bytes, 0)
    finally:
        os.close(descriptor)


def describe_free_space(files: Files, path: Path) -> str:
    """Return in words how much may still be written to the file system of `path`."""
    try:
        free = files.free_bytes(path)
        room = "an unknown number of bytes free" if free is None else f"{free} B free"
        return f"no inodes left, so no file can be made; {room}" if files.free_inodes(path) == 0 else room
    except OSError as error:
        return f"free space unknown: {error.strerror}"


def cannot_write(
    path: Path, error: OSError, *, what: str = "The checkpoint folder", found: str | None = None, fix: str | None = None
) -> CheckpointError:
    """Return the error of a folder or file, `what`, that cannot be written.

    Args:
        path: where the error does not name one.
        fix: by default, that of a checkpoint folder.
    """
    if fix is None:
        fix = "Fix the file system, or name another folder with checkpoint.save."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "Make room. A run deletes at its start what checkpoint.max_checkpoint_keep does not keep."
    problem = f"{what} cannot be written: {error.strerror} (errno {error.errno})"
    return CheckpointError(problem, where=error.filename or path, found=found, fix=fix)


def keep_block(descriptor: int) -> None:
    """Reserve the first block of an empty file, so that a full disk has room for what is written to it next.

    The file stays empty; a file system that cannot do this is left alone.
    """
    _libc.fallocate(descriptor, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(_BLOCK_BYTES))


def make_folders(files: Files, path: Path) -> None:
    """Make `path` and the folders above it that are missing; the names of those that are made here are durable then.

    Otherwise a power failure could take the folder with all that was synced in it.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        files.sync_folder(folder.parent)


def temporary_of(path: Path) -> Path:
    """Return where `replace_file` writes what becomes `path`; a process that is killed leaves it."""
    return path.with_name(f".{path.name}.new")


def replace_file(files: Files, path: Path, data: bytes) -> None:
    """Replace the content of `path` atomically and durably."""
    temporary = temporary_of(path)
    files.write_whole(temporary, data)
    files.rename(temporary, path)
    files.sync_folder(path.parent)
