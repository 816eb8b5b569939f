"""Writes files and folders atomically: under a temporary name, synced to disk, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from reprise.storage.paths import exists, is_dir, is_symlink, lexists

_MAX_BUFFERS = 512  # POSIX promises only 16 (IOV_MAX), Linux has 1024


class FileCalls:
    """File system calls for atomic writes, with a method for each: tests can count, fail or kill at any."""

    def write(self, descriptor: int, buffers: Sequence[memoryview], *, offset: int) -> None:
        """Write all `buffers`, end to end, at `offset`."""
        queue = [buffer for buffer in buffers if buffer.nbytes]
        first = 0
        while first < len(queue):
            count = os.pwritev(descriptor, queue[first : first + _MAX_BUFFERS], offset)
            offset += count
            while first < len(queue) and count >= queue[first].nbytes:
                count -= queue[first].nbytes
                first += 1
            if count:
                queue[first] = queue[first][count:]

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

    def write_new(self, path: Path, data: bytes) -> int:
        """Write a new file and return its open descriptor. Its content is durable after `sync`."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        with contextlib.ExitStack() as on_error:
            on_error.callback(os.close, descriptor)
            self.write(descriptor, [memoryview(data)], offset=0)
            on_error.pop_all()
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

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and its contents. It may be missing."""
        shutil.rmtree(path, ignore_errors=False, onerror=_ignore_missing)

    def remove_file(self, path: Path) -> None:
        """Remove a file. It may be missing."""
        path.unlink(missing_ok=True)


def _ignore_missing(_function: object, _path: str, error: tuple[type[BaseException], BaseException, object]) -> None:
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


def temporary_of(path: Path) -> Path:
    """Return the temporary path for `replace_file`. A killed process may leave a file there."""
    return path.with_name(f".{path.name}.new")


def replace_file(files: FileCalls, path: Path, data: bytes) -> None:
    """Replace a file's content atomically and durably. Only one process at a time may do this."""
    temporary = temporary_of(path)
    files.write_whole(temporary, data)
    files.rename(temporary, path)
    files.sync_folder(path.parent)


@contextmanager
def atomic_output(path: Path, files: FileCalls, *, replaces: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`. After the block, rename it to `path` and make the name durable.

    The caller writes a file or folder there and syncs its files; this function syncs folders. If the block raises, or
    leaves nothing at the temporary path, `path` stays unchanged. The temporary path is always removed.

    Args:
        replaces: Whether to replace an existing file, or an existing folder by a folder.

    Raises:
        OSError: The file system fails, or `path` exists and `replaces` is False (EEXIST).
    """
    # The random part separates hosts that share the folder and use the same process id.
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        yield partial
        if not lexists(partial):
            return
        if is_dir(partial):
            sync_folders(files, partial)
        if not replaces and lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        # A rename replaces a file or an empty folder. A folder with content is moved aside first.
        old = partial.with_suffix(".replaced") if is_dir(partial) and is_dir(path) and any(path.iterdir()) else None
        if old is not None:
            files.rename(path, old)
        files.rename(partial, path)
        files.sync_folder(path.parent)
        if old is not None:
            files.remove_tree(old)
    finally:
        with contextlib.suppress(OSError):  # an error in the block matters more
            if is_dir(partial):
                files.remove_tree(partial)
            else:
                files.remove_file(partial)


def sync_folders(files: FileCalls, folder: Path) -> None:
    """Make the names in a folder and its subfolders durable."""
    for path in folder.iterdir():
        if is_dir(path) and not is_symlink(path):
            sync_folders(files, path)
    files.sync_folder(folder)


def make_folders(files: FileCalls, path: Path) -> None:
    """Create `path` and its missing parents, and make the new names durable.

    Otherwise a power failure could remove the folder together with files synced in it.
    """
    missing = [folder for folder in (path, *path.parents) if not exists(folder)]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        files.sync_folder(folder.parent)
