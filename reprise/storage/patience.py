"""Distinguishes damage from temporary read failures, which are retried for a limited time."""

from __future__ import annotations

import copy
import errno
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
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
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
        "this host, and start again. If the file is lost for good, load an older iteration.",
    )


def retry(call: Callable[..., T], *arguments: object, repair: Callable[[], None] = lambda: None) -> T:
    """Return the result of `call` with these arguments, retrying for `RETRY_S` while it fails.

    Args:
        repair: Called before each retry. Its failure counts as that of `call`.

    Raises:
        OSError: The error proves damage, or was the last when time ran out.
    """
    waits, is_first = pauses(RETRY_S), True
    while True:
        try:
            if not is_first:
                repair()
            return call(*arguments)
        except OSError as error:
            if is_damage(error):
                raise
            if is_first:
                _log.warning("a read is tried again: %s", error)
            is_first = False
            if not next(waits, False):
                raise


def pauses(seconds: float) -> Iterator[bool]:
    """Pause and yield True for another try, until the time since the first pause began is over.

    Pauses double: thousands of ranks may try at once, for instance while a server fails over.
    """
    deadline, pause_s = time.monotonic() + seconds, _FIRST_PAUSE_S
    while time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        yield True


def look(call: Callable[[], T], *, where: object) -> T:
    """Return the result of `call`, retrying as `retry` does.

    Args:
        where: The path, if the error does not name it.

    Raises:
        UnreadableError: The error proves damage, or was the last when time ran out.
    """
    try:
        return retry(call)
    except OSError as error:
        raise unreadable(error, where=where) from error


def with_retries(files: Files) -> Files:
    """Return `files` which retry failing reads for a limited time, each after reopening its file."""
    patient, paths = copy.copy(files), dict[int, Path]()

    def open_for_reading(path: Path) -> int:
        descriptor = retry(files.open_for_reading, path)
        paths[descriptor] = path  # an unmounted file system's descriptors do not name theirs
        return descriptor

    def read(descriptor: int, buffer: memoryview, *, offset: int) -> int:
        call = partial(files.read, descriptor, buffer, offset=offset)
        return retry(call, repair=partial(files.reopen, descriptor, paths[descriptor]))

    for name in ("size", "tree"):
        setattr(patient, name, partial(retry, getattr(files, name)))
    patient.open_for_reading, patient.read = open_for_reading, read  # type: ignore[method-assign]
    return patient
