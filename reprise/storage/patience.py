"""Distinguishes damage from temporary read failures, which are retried for a limited time."""

from __future__ import annotations

import errno
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from reprise.errors import CheckpointError, UnreadableError
from reprise.storage.files import Files, T

_log = logging.getLogger(__name__)


# How long a failing read is retried, for instance while a server fails over or other processes exhaust a limit.
RETRY_S = 10.0
OLDER = "load an older iteration"
# Errors from a missing or too large file, or something else in its place. All others prove no damage.
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENAMETOOLONG, errno.EFBIG)


def is_damage(error: OSError) -> bool:
    """Return whether a failed read means that the file is missing or not a regular file."""
    return error.errno in _MISSING


def failed_read(what: str, error: OSError, *, where: object, fix: str | None = None) -> CheckpointError:
    """Return the error to raise after a failed read: UnreadableError unless the error itself proves damage.

    Args:
        what: The problem, if the file is missing.
        where: The path. For an unreadable file, a path in the error takes precedence.
        fix: The remedy, if the file is missing.
    """
    if is_damage(error):
        return CheckpointError(what, where=where, found=error.strerror, fix=fix)
    return unreadable(error, where=where)


def unreadable(error: OSError, *, where: object) -> UnreadableError:
    """Return the error for a path which cannot be read at the moment. Its content may be intact."""
    return UnreadableError(
        f"A file cannot be read now: {error.strerror} (errno {error.errno})",
        where=error.filename or where,
        fix="Nothing was changed, and the file may be whole. Repair the file system, the permissions or the limits of "
        f"this host, and start again. If the file is lost for good, {OLDER}.",
    )


def retry(call: Callable[[], T], *, where: object = None) -> T:
    """Return the result of `call`, retrying for `RETRY_S` while it fails.

    Args:
        where: The path to log, if the error does not name it.

    Raises:
        OSError: The error proves damage, or was the last when time ran out.
    """
    tries, is_first = waits(RETRY_S), True
    while True:
        try:
            return call()
        except OSError as error:
            if is_damage(error):
                raise
            if is_first:
                text = f"{error.strerror} (errno {error.errno})"
                _log.warning("%s cannot be read, retrying: %s", error.filename or where, text)
            is_first = False
            if not next(tries, False):
                raise


def look(call: Callable[[], T], *, where: object) -> T:
    """Return the result of `call`, retrying as `retry` does.

    Args:
        where: The path, if the error does not name it.

    Raises:
        UnreadableError: The error proves damage, or was the last when time ran out.
    """
    try:
        return retry(call, where=where)
    except OSError as error:
        raise unreadable(error, where=where) from error


def waits(seconds: float, *, pause_s: float = 0.05, longest_s: float = 1.0) -> Iterator[bool]:
    """Pause, then yield True for another try, until time is up. Pauses double, up to `longest_s`."""
    deadline = time.monotonic() + seconds
    while (now := time.monotonic()) < deadline:
        time.sleep(min(pause_s, deadline - now))
        pause_s = min(2 * pause_s, longest_s)
        yield True


class PatientFiles(Files):
    """Wraps `files` and retries failing reads for a limited time."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.reading_threads, self.step_bytes = files.reading_threads, files.step_bytes
        for name in ("map", "end", "close"):  # without retries
            setattr(self, name, getattr(files, name))
        for name in ("size", "is_folder"):
            setattr(self, name, partial(_patiently, getattr(files, name)))
        self._paths: dict[int, Path] = {}  # files opened so far, by descriptor

    def open_for_reading(self, path: Path) -> int:
        """Open a file for reading; see `Files.open_for_reading`."""
        descriptor = _patiently(self._files.open_for_reading, path)
        self._paths[descriptor] = path
        return descriptor

    def read(self, descriptor: int, buffer: memoryview, *, offset: int) -> int:
        """Fill `buffer` from `offset`, reopening the file after a failure; see `Files.read`."""
        path, tries = self._paths[descriptor], itertools.count()

        def read() -> int:
            if next(tries):
                self._files.reopen(descriptor, path)
            return self._files.read(descriptor, buffer, offset=offset)

        return retry(read, where=path)


def _patiently(call: Callable[[Path], T], path: Path) -> T:
    return retry(partial(call, path), where=path)
