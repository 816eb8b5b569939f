"""Makes room for checkpoints: deletes those that retention gives up, and refuses a save that does not fit."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from trainer.checkpoint.commit.attempt import Attempt, Successor
from trainer.checkpoint.format import json_file
from trainer.checkpoint.format.layout import Layout
from trainer.checkpoint.format.names import STATE
from trainer.checkpoint.policy import Retention
from trainer.checkpoint.storage.files import cannot_write
from trainer.checkpoint.storage.folder import CheckpointFolder
from trainer.checkpoint.storage.lock import FolderLock
from trainer.errors import CheckpointError, LockError, TrainerError, UnreadableError

_log = logging.getLogger(__name__)


def decide_expired(
    folder: CheckpointFolder, retention: Retention, *, pinned: Collection[int]
) -> tuple[list[int], list[int]]:
    """Return the iterations that retention gives up, and all committed ones; none where the folder cannot be listed.

    Args:
        pinned: iterations that stay, beside those with a `hold` file.
    """
    try:
        committed = folder.committed()
        held = folder.held(committed)
    except OSError as error:
        _log.error("%s cannot be listed, nothing is deleted: %s", folder.root, error)
        return [], []
    losses, unknown = _losses(folder, committed) if retention.keep_best else ({}, [])
    return retention.expired(committed, pinned={*pinned, *held, *unknown}, losses=losses), committed


def delete(
    folder: CheckpointFolder,
    iterations: Sequence[int],
    *,
    attempt: str,
    lock: FolderLock | None,
    successor: Successor | None = None,
) -> list[int]:
    """Delete committed iterations and return those that are gone; a line of the log names the others. Rank 0 only.

    Args:
        attempt: names the folders on their way out; unique in the life of the folder.
        lock: looked at again before each of them.
        successor: the attempt that overwrites the files of the last of them in place, which therefore stay until then;
            None if there is no such attempt.
    """
    gone = []
    for iteration in iterations:
        try:
            if lock is not None:
                lock.check()
            if successor is not None and iteration == iterations[-1] >= successor.first:
                folder.discard(iteration, successor.name)
            else:
                folder.files.remove_tree(folder.discard(iteration, attempt))
            gone.append(iteration)
        except (OSError, LockError) as error:
            _log.error("iteration %d could not be deleted: %s", iteration, error)
    return gone


def _losses(folder: CheckpointFolder, iterations: Sequence[int]) -> tuple[dict[int, float], list[int]]:
    """Return the validation loss of the checkpoints that were evaluated when they were saved.

    Second are those whose state cannot be read now: any of them may be the best.
    """
    found, unknown = {}, []
    for iteration in iterations:
        path = folder.iteration(iteration) / STATE
        try:
            loss = json_file.read(path).get("valid_loss")
        except UnreadableError as error:
            _log.error("iteration %d stays, its loss is not known: %s", iteration, error)
            unknown.append(iteration)
            continue
        except TrainerError as error:
            _log.error("%s cannot be read, its loss counts for nothing: %s", path, error)
            continue
        if isinstance(loss, float):  # as a loss is written; `json_file` lets no NaN through
            found[iteration] = float(loss)
    return found, unknown


def _needed_bytes(layout: Layout) -> int:
    """Return the largest size of a checkpoint: its tensor files, and JSON files that grow with tensors and digests."""
    return layout.total_bytes + (64 << 10) + 1024 * len(layout.places) + layout.total_bytes // (128 << 10)


def require_room(
    attempt: Attempt,
    documents: Mapping[str, json_file.Document],
    retention: Retention | None = None,
    *,
    parts: int = 1,
) -> None:
    """Refuse to begin where tensors and documents would not fit beside all that is there.

    Args:
        parts: how many folders share the tensors, about evenly.
        retention: of the run that saves, for the advice: it has not deleted anything for this save yet.
    """
    folder, files = attempt.folder, attempt.folder.files
    needed = _needed_bytes(attempt.layout) // parts + sum(
        len(data) for data in documents.values() if isinstance(data, bytes)
    )
    try:
        free = files.free_bytes(folder.root)
        # Looked at afterwards: what other ranks reserve meanwhile may count twice, but is never missing.
        taken = files.allocated_bytes(attempt.partial, *folder.discarded(attempt.name))
    except OSError as error:
        raise cannot_write(folder.root, error) from error
    if free is not None and free + taken < needed:
        raise CheckpointError(
            "There is no room for a checkpoint",
            where=folder.root,
            expected=f"{needed} B free",
            found=f"{free} B free",
            fix=_advice(retention),
        )


def _advice(retention: Retention | None) -> str:
    """Return how to make room: a smaller `max_checkpoint_keep` acts at the start of a run."""
    if retention is None:
        return "Make room, or name another folder."
    if retention.max_checkpoint_keep == 1:
        return "Make room: the next checkpoint is written before an older one is deleted, and one is kept already."
    if retention.max_checkpoint_keep == 0:
        smaller, kept = f"{retention.key}=1 or more", "all are kept"
    else:
        smaller, kept = f"a smaller {retention.key}", f"{retention.max_checkpoint_keep} are kept"
    return f"Make room, or start the run again with {smaller}: the start deletes what is beyond it; now {kept}."
