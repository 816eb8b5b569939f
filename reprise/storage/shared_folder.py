"""Checks that all ranks write into one checkpoint folder: a rank looks for the file that another has made there.

A path proves nothing: a host with a missing mount has another folder under the same path, or none.
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

# How long a rank looks for what rank 0 has written. A file system on the network may show it late.
SEEN_WITHIN_S = 5.0
_PAUSES_S = (0.005, 0.25)


def why_unseen(mark: Path, files: Files) -> str:
    """Return an empty string as soon as this rank sees the marker file; else, after SEEN_WITHIN_S, the reason."""
    return look_again(lambda: _problem_of(files.size, mark), mark.parent)


def require_mark(mark: Path, folder: CheckpointFolder, *, leader: int = 0, is_local: bool = False) -> None:
    """Return as soon as this rank sees the marker file of its leader.

    Args:
        folder: the folder of rank 0, or of the host.
        leader: the rank that made the marker.
        is_local: whether the folder is a host's own, whose first rank made the marker.

    Raises:
        CheckpointError: naming this host and the path, if the marker is not seen within SEEN_WITHIN_S.
    """
    if problem := why_unseen(mark, folder.files):
        raise _unseen(folder, leader, mark.parent, f"the file {mark.name}", problem, is_local=is_local)


def _unseen(
    folder: CheckpointFolder, leader: int, where: Path, expected: str, found: str, *, is_local: bool = False
) -> CheckpointError:
    return CheckpointError(
        f"This host does not see the checkpoint folder of rank {leader}",
        where=on_this_host(where),
        expected=f"{expected} that it has made there",
        found=found,
        fix="Nothing was saved. Show all ranks of a host one folder at this path." if is_local else _shared_fix(folder),
    )


def _shared_fix(folder: CheckpointFolder) -> str:
    return (
        "Nothing was saved. Mount the same file system at this path on every host, or name "
        f"{folder.terms.another}, one that all hosts share. {folder.terms.unshared}"
    ).rstrip()


def view_of(folder: CheckpointFolder, *, leader: int = 0) -> int:
    """Return the identity of a folder of this host: equal for processes that write into the same folder.

    Raises:
        CheckpointError: naming this host and the path, if the folder is not seen within SEEN_WITHIN_S.
    """
    if problem := look_again(lambda: _problem_of(os.stat, folder.root), folder.root):
        raise _unseen(folder, leader, folder.root, "the folder", problem)
    status, namespace = os.stat(folder.root), os.stat("/proc/self/ns/mnt")
    view = f"{socket.gethostname()} {namespace.st_ino} {status.st_dev} {status.st_ino}"
    return int.from_bytes(hashlib.blake2b(view.encode(), digest_size=8).digest(), "little")


def leave_sign(partial: Path, view: int, files: Files) -> None:
    """Leave a file by which the leader sees that a rank with this view of the folder writes into it.

    Raises:
        CheckpointError: if the file system fails.
    """
    try:
        files.make_folder(partial)
        files.mark(_sign(partial, view))
    except OSError as error:
        raise cannot_write(partial, error, files=files) from error


def require_signs(partial: Path, views: Mapping[int, int], folder: CheckpointFolder, *, leader: int) -> None:
    """Return as soon as the folder of an attempt has the signs of all views, which are removed.

    Args:
        views: each with the first rank that has it.
        leader: this rank.

    Raises:
        CheckpointError: naming a rank that writes elsewhere, if its sign is not seen within SEEN_WITHIN_S.
    """
    for view, rank in views.items():
        sign = _sign(partial, view)
        if problem := why_unseen(sign, folder.files):
            raise CheckpointError(
                f"Rank {rank} writes into another folder than rank {leader}",
                where=on_this_host(partial),
                expected=f"the file {sign.name} that rank {rank} has made there",
                found=problem,
                fix=_shared_fix(folder),
            )
    for view in views:
        folder.files.remove_file(_sign(partial, view))


def require_view(folder: CheckpointFolder, view: int, *, leader: int = 0) -> None:
    """Refuse a folder that is another than the one of an earlier view, as after a mount appeared or disappeared.

    Earlier writes are then elsewhere, even if this one can be written now.

    Raises:
        CheckpointError: naming this host and the path.
    """
    if view_of(folder, leader=leader) != view:
        raise CheckpointError(
            "The checkpoint folder of this host became another one during a save",
            where=on_this_host(folder.root),
            fix="Nothing was saved. Check for services that mount and unmount file systems on this host.",
        )


def _sign(partial: Path, view: int) -> Path:
    return partial / f".written-{view:016x}"


def look_again(problem: Callable[[], str], folder: Path) -> str:
    """Ask for a `problem` until there is none or SEEN_WITHIN_S have passed; return the last one.

    Args:
        folder: the folder to look in; its names are revalidated before each further look.
    """
    waits = Patience(SEEN_WITHIN_S, pauses_s=_PAUSES_S).waits()
    while (answer := problem()) and next(waits, False):
        _revalidate(folder)
    return answer


def on_this_host(path: Path) -> str:
    """Return in words the path and the host it was looked up on."""
    return f"host {socket.gethostname()}, {path.absolute()}"


def _revalidate(folder: Path) -> None:
    """Open a folder and all its parents: an NFS client then asks its server and forgets negative lookups."""
    for path in reversed((folder.absolute(), *folder.absolute().parents)):
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def _problem_of(look: Callable[[Path], object], path: Path) -> str:
    try:
        look(path)
    except OSError as error:
        return error.strerror or str(error)
    return ""
