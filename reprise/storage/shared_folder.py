"""Checks whether all ranks see the same checkpoint folder: a rank looks for what its leader just made there.

Equal paths prove nothing: a host with a missing mount has another folder at the same path, or none.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from reprise.errors import CheckpointError
from reprise.storage.folder import CheckpointFolder
from reprise.storage.lock import LOCK
from reprise.storage.paths import is_stored
from reprise.storage.patience import pauses

# How long a rank looks for what its leader made. A network file system may show it late.
SEEN_WITHIN_S = 5.0


def require_lock(folder: CheckpointFolder, nonce: str, *, leader: int) -> None:
    """Wait until this rank sees that its leader has locked the folder.

    Args:
        nonce: This launch's random name, which is in the lock.
        leader: The rank with the lock.

    Raises:
        CheckpointError: The lock is not seen within SEEN_WITHIN_S. The message names this host and the path.
    """

    def look(path: Path) -> None:
        if f'"{nonce}"'.encode() not in folder.files.read_whole(path):
            raise OSError("another lock")

    _require(folder, folder.root / LOCK, look, leader)


@contextlib.contextmanager
def seen_throughout(partial: Path, folder: CheckpointFolder, *, leader: int) -> Iterator[None]:
    """Wait until this rank sees its leader's partial folder, and check after the block that it is still the same.

    A mount or unmount changes it: earlier writes are then elsewhere, even if the folder is writable now.

    Raises:
        CheckpointError: The folder is not seen within SEEN_WITHIN_S, or has changed. The message names this host and
            the path.
    """
    _require(folder, partial, os.stat, leader)
    before = os.stat(partial)
    yield
    with contextlib.suppress(OSError):
        if os.path.samestat(before, os.stat(partial)):
            return
    raise CheckpointError(
        "This host's checkpoint folder changed during a save",
        where=on_this_host(folder.root),
        fix="Nothing was saved. Check for services that mount and unmount file systems on this host.",
    )


def _require(folder: CheckpointFolder, path: Path, look: Callable[[Path], object], leader: int) -> None:
    if problem := why_unseen(path, look):
        raise CheckpointError(
            f"This host does not see the checkpoint folder of rank {leader}",
            where=on_this_host(path),
            expected="what that rank has made there",
            found=problem,
            fix="Nothing was saved. Mount the same file system at this path on every host, or name "
            f"{folder.terms.another}, one that all hosts share. {folder.terms.unshared}".rstrip(),
        )


def why_unseen(path: Path, look: Callable[[Path], object]) -> str:
    """Wait until `look`, called with the path, raises no OSError, and return "". After SEEN_WITHIN_S, return why.

    For a path in a store, do not wait.
    """
    waits = pauses(SEEN_WITHIN_S)
    while True:
        try:
            look(path)
            return ""
        except OSError as error:
            if is_stored(path) or not next(waits, False):
                return error.strerror or str(error)
        _revalidate(path)


def on_this_host(path: Path) -> str:
    """Name this host and the absolute path, for messages."""
    return f"host {socket.gethostname()}, {path.absolute()}"


def _revalidate(path: Path) -> None:
    """Open a folder and its parents, which makes an NFS client ask its server and forget negative lookups."""
    path = path.absolute()
    for folder in reversed((path, *path.parents)):
        with contextlib.suppress(OSError):
            os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
