"""Checks whether all ranks write to the same checkpoint folder: a rank looks for a file created there by another rank.

Equal paths prove nothing: a host with a missing mount has another folder at the same path, or none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from reprise.errors import CheckpointError
from reprise.storage.files import Files, cannot_write
from reprise.storage.folder import CheckpointFolder
from reprise.storage.patience import Patience

# How long a rank looks for another rank's file. A network file system may show it late.
SEEN_WITHIN_S = 5.0
_PAUSES_S = (0.005, 0.25)


def why_unseen(mark: Path, files: Files) -> str:
    """Wait until this rank sees the marker file, and return "". After SEEN_WITHIN_S, return the reason."""
    return look_again(lambda: _problem_of(files.size, mark), mark.parent)


def require_mark(mark: Path, folder: CheckpointFolder, *, leader: int = 0) -> None:
    """Wait until this rank sees its leader's marker file.

    Args:
        folder: The checkpoint folder.
        leader: The rank creating the marker.

    Raises:
        CheckpointError: The marker is not seen within SEEN_WITHIN_S. The message names this host and the path.
    """
    if problem := why_unseen(mark, folder.files):
        raise _unseen(folder, leader, mark.parent, f"the file {mark.name}", problem)


def _unseen(folder: CheckpointFolder, leader: int, where: Path, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"This host does not see the checkpoint folder of rank {leader}",
        where=on_this_host(where),
        expected=f"{expected} that it created there",
        found=found,
        fix=_shared_fix(folder),
    )


def _shared_fix(folder: CheckpointFolder) -> str:
    return (
        "Nothing was saved. Mount the same file system at this path on every host, or name "
        f"{folder.terms.another}, one that all hosts share. {folder.terms.unshared}"
    ).rstrip()


def view_of(folder: CheckpointFolder, *, leader: int = 0) -> int:
    """Return a folder's identity on this host: equal for processes seeing the same folder in the same mount
    namespace.

    Raises:
        CheckpointError: The folder is not seen within SEEN_WITHIN_S. The message names this host and the path.
    """
    if problem := look_again(lambda: _problem_of(os.stat, folder.root), folder.root):
        raise _unseen(folder, leader, folder.root, "the folder", problem)
    status, namespace = os.stat(folder.root), os.stat("/proc/self/ns/mnt")
    view = f"{socket.gethostname()} {namespace.st_ino} {status.st_dev} {status.st_ino}"
    return int.from_bytes(hashlib.blake2b(view.encode(), digest_size=8).digest(), "little")


def leave_sign(partial: Path, view: int, files: Files) -> None:
    """Leave a sign file, which shows the leader that a rank with this view writes to the leader's folder.

    Raises:
        CheckpointError: The file system fails.
    """
    try:
        files.make_folder(partial)
        files.mark(_sign(partial, view))
    except OSError as error:
        raise cannot_write(partial, error, files=files) from error


def require_signs(partial: Path, views: Mapping[int, int], folder: CheckpointFolder, *, leader: int) -> None:
    """Wait until the partial folder has a sign file for every view, and remove these files.

    Args:
        views: The first rank with each view, by view.
        leader: This rank.

    Raises:
        CheckpointError: A sign is not seen within SEEN_WITHIN_S. The message names the rank writing elsewhere.
    """
    for view, rank in views.items():
        sign = _sign(partial, view)
        if problem := why_unseen(sign, folder.files):
            raise CheckpointError(
                f"Rank {rank} writes into another folder than rank {leader}",
                where=on_this_host(partial),
                expected=f"the file {sign.name} that rank {rank} created there",
                found=problem,
                fix=_shared_fix(folder),
            )
    for view in views:
        folder.files.remove_file(_sign(partial, view))


def require_view(folder: CheckpointFolder, view: int, *, leader: int = 0) -> None:
    """Check whether the folder still has an earlier view, which a mount or unmount changes.

    After a change, earlier writes are elsewhere, even if the folder is writable now.

    Raises:
        CheckpointError: The view has changed. The message names this host and the path.
    """
    if view_of(folder, leader=leader) != view:
        raise CheckpointError(
            "This host's checkpoint folder changed during a save",
            where=on_this_host(folder.root),
            fix="Nothing was saved. Check for services that mount and unmount file systems on this host.",
        )


def _sign(partial: Path, view: int) -> Path:
    return partial / f".written-{view:016x}"


def look_again(problem: Callable[[], str], folder: Path) -> str:
    """Call `problem` until it returns "" or SEEN_WITHIN_S has passed, and return its last result.

    Args:
        folder: The folder to revalidate before each further call.
    """
    waits = Patience(SEEN_WITHIN_S, pauses_s=_PAUSES_S).waits()
    while (answer := problem()) and next(waits, False):
        _revalidate(folder)
    return answer


def on_this_host(path: Path) -> str:
    """Name this host and the absolute path, for messages."""
    return f"host {socket.gethostname()}, {path.absolute()}"


def _revalidate(folder: Path) -> None:
    """Open a folder and its parents, which makes an NFS client ask its server and forget negative lookups."""
    for path in reversed((folder.absolute(), *folder.absolute().parents)):
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def _problem_of(look: Callable[[Path], object], path: Path) -> str:
    try:
        look(path)
    except OSError as error:
        return error.strerror or str(error)
    return ""
