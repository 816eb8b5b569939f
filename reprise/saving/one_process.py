"""Writes a checkpoint from a single process, with tensors from elsewhere, such as another program's files."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from reprise.commit import finish
from reprise.commit.attempt import Attempt
from reprise.commit.joint_plan import tile
from reprise.format.layout import Layout
from reprise.format.manifest import WrittenPiece
from reprise.saving.policy import Retention
from reprise.saving.retention import require_room
from reprise.storage.folder import CheckpointFolder, require_vacant
from reprise.storage.json_file import Document
from reprise.storage.lock import FolderLock

WriteTensors = Callable[[Path], Sequence[WrittenPiece]]


def write_checkpoint(
    folder: CheckpointFolder,
    iteration: int,
    layout: Layout,
    write: WriteTensors,
    *,
    documents: Mapping[str, Document],
    aliases: Mapping[str, str],
) -> Path:
    """Write `iter_<iteration>` as a single-rank run would save it, and return its path.

    Takes the folder's lock and sweeps up after dead attempts.

    Args:
        write: Writes and syncs the tensor files in `layout` to the folder it is called with. Returns their pieces.
        documents: The files without tensors, by name.
        aliases: The tensors' second names, by name.

    Raises:
        LockError: A run writes to the folder.
        CheckpointError: The iteration already exists, does not fit, or cannot be written. No checkpoint is changed.
    """
    nonce, files = secrets.token_hex(4), folder.files
    attempt = Attempt(iteration, f"{nonce}-1", folder, layout)
    lock = FolderLock(folder.root, nonce)
    with folder.writing(), lock, lock:
        folder.sweep()
        require_vacant(attempt.target)
        require_room(attempt, documents, Retention())
        try:
            files.make_folder(attempt.partial)
            tensors = tile(layout, write(attempt.partial))
            json_files = finish.json_files(attempt, tensors, documents=documents, aliases=aliases)
            finish.prepare(attempt, json_files, lock=lock)
            finish.rename(attempt)
        finally:
            files.remove(attempt.partial)  # no longer there after the rename
    return attempt.target
