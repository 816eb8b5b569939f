"""Path checks, and safe opening for regular files.

A check returns False if nothing is there, and raises OSError if the file system fails: a stale handle does not mean a
missing checkpoint. pathlib returns False for both, in `glob` since Python 3.12 and in `exists`, `is_dir`, `is_file` and
`is_symlink` since 3.14. Pipes and devices, where opening or reading may block forever, are not opened.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import stat
from pathlib import Path

# A limit for files read whole. A 405B model's manifest has about 12 MB, the largest tokenizer.json in use 35 MB.
MAX_BYTES = 256 << 20

_MAX_NAME_BYTES = 255  # on common file systems

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# Why a URL is refused as a path, as a predicate.
IS_URL = "is a URL, not a path; `hf download` fetches a hub's folder"

_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP)  # as in pathlib before Python 3.14


def exists(path: Path) -> bool:
    """Return whether a file or folder exists. A link counts as its target.

    Raises:
        OSError: The file system fails.
    """
    return _mode(path) != 0


def lexists(path: Path) -> bool:
    """Return whether anything has this name. A link counts, whatever it points to.

    Raises:
        OSError: The file system fails.
    """
    return _mode(path, follows_links=False) != 0


def is_dir(path: Path) -> bool:
    """Return whether the path is a folder, or a link to a folder.

    Raises:
        OSError: The file system fails.
    """
    return stat.S_ISDIR(_mode(path))


def is_file(path: Path) -> bool:
    """Return whether the path is a regular file, or a link to a regular file.

    Raises:
        OSError: The file system fails.
    """
    return stat.S_ISREG(_mode(path))


def is_symlink(path: Path) -> bool:
    """Return whether the path is a symbolic link, whatever it points to.

    Raises:
        OSError: The file system fails.
    """
    return not is_stored(path) and stat.S_ISLNK(_mode(path, follows_links=False))  # a store has no links


def matching(folder: Path, pattern: str) -> list[Path]:
    """Return the sorted paths in a folder whose names match an `fnmatch` pattern. Empty if the folder does not exist.

    Raises:
        OSError: The file system fails.
    """
    children = folder.iterdir() if is_dir(folder) else ()
    return sorted(child for child in children if fnmatch.fnmatchcase(child.name, pattern))


def open_regular(path: Path) -> int:
    """Open a regular file for reading, or a link's target, and return its descriptor.

    Raises:
        OSError: The file cannot be opened, or is a pipe, a device, a socket or a folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would block otherwise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_regular(path: Path, *, limit_bytes: int = MAX_BYTES) -> bytes:
    """Return a regular file's content.

    Args:
        limit_bytes: The largest accepted size in bytes.

    Raises:
        OSError: See `open_regular`; or the file is larger than the limit (EFBIG).
    """
    with os.fdopen(open_regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > limit_bytes:
            raise OSError(errno.EFBIG, f"larger than {limit_bytes} B", str(path))
        return file.read()


def is_file_name(text: str) -> bool:
    """Return whether a text is a valid file name, without a path to other folders."""
    size = len(text.encode("utf-8", "surrogatepass"))
    return 0 < size <= _MAX_NAME_BYTES and Path(text).name == text != ".." and "\0" not in text


def is_stored(path: Path) -> bool:
    """Return whether a path is in an object store, not in a file system."""
    return type(path).stat is not Path.stat


def is_url(text: str) -> bool:
    """Return whether a text starts with a scheme, such as `s3://` or `file://`."""
    return _URL.match(text.strip()) is not None


def _mode(path: Path, *, follows_links: bool = True) -> int:
    """Return a path's mode (type and permissions), or 0 if nothing is there."""
    try:
        return path.stat(follow_symlinks=follows_links).st_mode
    except ValueError:  # nothing can have this name, as with a null byte
        return 0
    except OSError as error:
        if error.errno in _MISSING:
            return 0
        raise
