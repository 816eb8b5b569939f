"""Checks that every rank sees the checkpoint folder of rank 0, which leaves a marker file for the others to find.

A path proves nothing: a host with a missing mount has another folder under the same path, or none.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from reprise.errors import CheckpointError
from reprise.storage.files import Files
from reprise.storage.folder import CheckpointFolder
from reprise.storage.patience import Patience

# How long a rank looks for what rank 0 has written. A file system on the network may show it late.
SEEN_WITHIN_S = 5.0
_PAUSES_S = (0.005, 0.25)


def sees_mark(mark: Path, files: Files) -> bool:
    """Return whether this rank sees the marker file now. Its name is used only once."""
    return not _problem_of(mark, files)


def why_unseen(mark: Path, files: Files) -> str:
    """Return an empty string as soon as this rank sees the marker file; else, after SEEN_WITHIN_S, the reason."""
    return look_again(lambda: _problem_of(mark, files), mark.parent)


def require_mark(mark: Path, folder: CheckpointFolder, *, leader: int = 0, is_local: bool = False) -> None:
    """Return as soon as this rank sees the marker file of its leader.

    Args:
        folder: the folder of rank 0, or of the host.
        leader: the rank of the marker, where all ranks share the folder.
        is_local: whether the folder is a host's own, whose first rank made the marker.

    Raises:
        CheckpointError: naming this host and the path, if the marker is not seen within SEEN_WITHIN_S.
    """
    problem = why_unseen(mark, folder.files)
    if not problem:
        return
    maker, what = f"rank {leader}", f"This host does not see the checkpoint folder of rank {leader}"
    fix = (
        "Nothing was saved. Mount the same file system at this path on every host, or name "
        f"{folder.terms.another}, one that all hosts share. {folder.terms.unshared}"
    ).rstrip()
    if is_local:
        maker, what = "the first rank of this host", "A rank does not see the folder of local checkpoints of its host"
        fix = "Nothing was saved. Let all ranks of a host see one folder at this path."
    expected = f"the file {mark.name} that {maker} has made there"
    raise CheckpointError(what, where=on_this_host(mark.parent), expected=expected, found=problem, fix=fix)


@contextlib.contextmanager
def unchanged(folder: Path) -> Iterator[Callable[[], None]]:
    """Return a call which raises if `folder` is another folder than now, as after a mount appeared or disappeared.

    Earlier writes are then elsewhere, even if rank 0's marker is visible now. The CheckpointError names this host and
    the path.
    """
    with contextlib.ExitStack() as ending:
        before: os.stat_result | None = None
        with contextlib.suppress(OSError):  # then it cannot be written to
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            ending.callback(os.close, descriptor)  # while it is open, its number is given to no other folder
            before = os.fstat(descriptor)

        def require() -> None:
            with contextlib.suppress(OSError):
                if before is not None and os.path.samestat(before, os.stat(folder)):
                    return
            raise CheckpointError(
                "The checkpoint folder of this host became another one during a save",
                where=on_this_host(folder),
                fix="Nothing was saved. Check for services that mount and unmount file systems on this host.",
            )

        yield require


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


def _problem_of(mark: Path, files: Files) -> str:
    try:
        files.size(mark)
    except OSError as error:
        return error.strerror or str(error)
    return ""
