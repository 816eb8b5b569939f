"""Opens regular files named by users, and refuses pipes and devices, on which opening or reading may block forever."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

# For files that are small by nature: a configuration, a tokenizer. The largest tokenizer.json in use has 35 MB.
SMALL_BYTES = 256 << 20

_MOST_NAME_BYTES = 255  # of the usual file systems

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def open_regular(path: Path, *, follows_links: bool = True) -> int:
    """Open a regular file for reading and return its descriptor.

    Raises:
        OSError: the file cannot be opened, or is a pipe, a device, a socket, a folder, or a link that is not followed.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe without a writer would block
    descriptor = os.open(path, flags if follows_links else flags | os.O_NOFOLLOW)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: Path, *, limit_bytes: int | None = None, follows_links: bool = True) -> bytes:
    """Return the content of a regular file.

    Args:
        limit_bytes: the largest size that is accepted; None for no limit.
        follows_links: read the target of a symbolic link; otherwise a link is refused.

    Raises:
        OSError: as `open_regular`, or EFBIG where the file is larger than the limit.
    """
    with os.fdopen(open_regular(path, follows_links=follows_links), "rb") as file:
        if limit_bytes is not None and os.fstat(file.fileno()).st_size > limit_bytes:
            raise OSError(errno.EFBIG, f"larger than {limit_bytes} B", str(path))
        return file.read()


def is_file_name(text: str) -> bool:
    """Return whether a text names something in a folder, as a file system allows, and nothing outside it."""
    size = len(text.encode("utf-8", "surrogatepass"))
    return 0 < size <= _MOST_NAME_BYTES and not {"/", "\0"} & set(text) and text not in (".", "..")


def is_url(text: str) -> bool:
    """Return whether a path begins with a scheme, such as `s3://` or `file://`."""
    return _URL.match(text.strip()) is not None
