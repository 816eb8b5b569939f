"""What lies at a path, and opening it where it is a regular file.

A question is answered with no where nothing is there, and ends with an OSError where the file system fails: a stale
handle is no missing checkpoint. pathlib answers no to both, in `glob` since Python 3.12 and in `exists`, `is_dir`,
`is_file` and `is_symlink` since 3.14. Pipes and devices, on which opening or reading may block forever, are not opened.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import stat
from pathlib import Path

# For files that are small by nature: a configuration, a tokenizer. The largest tokenizer.json in use has 35 MB.
SMALL_BYTES = 256 << 20

_MOST_NAME_BYTES = 255  # of the usual file systems

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# A hub's addresses, and the commands that download a model and a data set.
_HUBS = (
    (
        r"(?:hf:/|https?://huggingface\.co)",
        "hf download {} --local-dir FOLDER",
        "hf download --repo-type dataset {} --local-dir FOLDER",
    ),
    (
        r"(?:ms:/|modelscope:/|https?://(?:www\.)?modelscope\.cn)",
        "modelscope download --model {} --local_dir FOLDER",
        "modelscope download --dataset {} --local_dir FOLDER",
    ),
)

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP)  # as in pathlib before Python 3.14


def exists(path: Path) -> bool:
    """Return whether there is a file or a folder; a link counts as its target.

    Raises:
        OSError: the file system fails.
    """
    return _mode(path) != 0


def lexists(path: Path) -> bool:
    """Return whether there is anything of this name; a link counts, whatever it points to.

    Raises:
        OSError: the file system fails.
    """
    return _mode(path, follows_links=False) != 0


def is_dir(path: Path) -> bool:
    """Return whether there is a folder, or a link to a folder.

    Raises:
        OSError: the file system fails.
    """
    return stat.S_ISDIR(_mode(path))


def is_file(path: Path) -> bool:
    """Return whether there is a regular file, or a link to one.

    Raises:
        OSError: the file system fails.
    """
    return stat.S_ISREG(_mode(path))


def is_symlink(path: Path) -> bool:
    """Return whether there is a symbolic link, whatever it points to.

    Raises:
        OSError: the file system fails.
    """
    return not is_stored(path) and stat.S_ISLNK(_mode(path, follows_links=False))


def matching(folder: Path, pattern: str) -> list[Path]:
    """Return what lies below a folder and fits a pattern, sorted; an empty list where there is no folder.

    Args:
        pattern: a pattern of `fnmatch` for a name, or several with slashes between for names at each depth.

    Raises:
        OSError: the file system fails.
    """
    paths = [folder]
    for part in pattern.split("/"):
        paths = [child for path in paths for child in _children(path, part)]
    return sorted(paths)


def folders_below(folder: Path) -> list[Path]:
    """Return the folders below a folder, without links.

    Raises:
        OSError: the file system fails.
    """
    folders = [child for child in folder.iterdir() if is_dir(child) and not is_symlink(child)]
    return [*folders, *(inner for child in folders for inner in folders_below(child))]


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


def is_stored(path: Path) -> bool:
    """Return whether a path lies in a store, which it asks for its status, and not in a file system."""
    return type(path).stat is not Path.stat


def is_url(text: str) -> bool:
    """Return whether a path begins with a scheme, such as `s3://` or `file://`."""
    return _URL.match(text.strip()) is not None


def url_problem(text: str) -> str:
    """Return why a URL is refused in place of a path, as a predicate; for a hub's, with the command to download it."""
    command = download_command(text)
    if command is not None:
        return f"is the URL of a hub: run `{command}`, and give FOLDER here"
    return "is a URL; only paths of mounted file systems can be used"


def download_command(text: str) -> str | None:
    """Return the command that downloads a hub's URL to a folder; None for other texts."""
    for hub, of_model, of_data in _HUBS:
        if match := re.match(rf"{hub}(?:/models)?/(datasets/)?([^/@?#]+/[^/@?#]+)", text.strip()):
            return (of_data if match[1] else of_model).format(match[2])
    return None


def _mode(path: Path, *, follows_links: bool = True) -> int:
    """Return the type and the permissions of what lies at a path; 0 where nothing is there."""
    try:
        return path.stat(follow_symlinks=follows_links).st_mode
    except (OSError, ValueError) as error:
        if _is_missing(error):
            return 0
        raise


def _is_missing(error: OSError | ValueError) -> bool:
    """Return whether an error says that nothing has a name, or that no file can have it, as one with a null byte."""
    return not isinstance(error, OSError) or error.errno in _NOT_THERE


def _children(folder: Path, pattern: str) -> list[Path]:
    try:
        return [child for child in folder.iterdir() if fnmatch.fnmatchcase(child.name, pattern)]
    except (OSError, ValueError) as error:
        if _is_missing(error):
            return []
        raise
