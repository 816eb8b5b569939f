"""Makes room for checkpoints: deletes those that retention gives up, and refuses a save that does not fit."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from reprise import json_file
from reprise.commit.attempt import Attempt, Successor
from reprise.errors import CheckpointError, LockError, TrainerError, UnreadableError
from reprise.format.host_file import path_of
from reprise.format.layout import Layout
from reprise.format.names import INTERIM, STATE
from reprise.policy import Retention
from reprise.storage.folder import CheckpointFolder
from reprise.storage.lock import FolderLock

_log = logging.getLogger(__name__)


def decide_expired(
    folder: CheckpointFolder, retention: Retention, *, pinned: Collection[int] = ()
) -> tuple[list[int], list[int]]:
    """Return the iterations that retention gives up, and all committed ones; none where the folder cannot be listed.

    Args:
        pinned: iterations that stay, beside those that are held.
    """
    try:
        committed = folder.committed()
        protected = folder.held(committed)
    except OSError as error:
        _log.error("%s cannot be listed, nothing is deleted: %s", folder.root, error)
        return [], []
    records = _Records.of(folder, committed if retention.max_checkpoint_keep else [])
    pinned = {*pinned, *protected, *records.unknown}
    expired = retention.expired(committed, pinned=pinned, losses=records.losses, interim=records.interim)
    if retention.mirror is not None and expired:
        unmirrored = retention.mirror.unmirrored(folder.root, committed, expired)
        expired = [iteration for iteration in expired if iteration not in unmirrored]
    return expired, committed


def delete(
    folder: CheckpointFolder,
    iterations: Sequence[int],
    *,
    attempt: str,
    lock: FolderLock | None,
    successor: Successor | None = None,
) -> list[int]:
    """Delete committed iterations and return those that are gone; a line of the log names the others. Rank 0 only.

    An iteration that is held by now stays.

    Args:
        attempt: names the folders on their way out; unique in the life of the folder.
        lock: looked at again before each of them.
        successor: the attempt that overwrites the files of the last of them in place, which therefore stay until then;
            None if there is no such attempt.
    """
    deleted = []
    for iteration in iterations:
        try:
            if lock is not None:
                lock.check()
            is_taken_over = successor is not None and iteration == iterations[-1] >= successor.first
            path = folder.discard(iteration, successor.name if successor is not None and is_taken_over else attempt)
            if path is None:
                _log.info("iteration %d stays, somebody has begun to read it", iteration)
                continue
            if not is_taken_over:
                folder.files.remove_tree(path)
            deleted.append(iteration)
        except (OSError, LockError) as error:
            _log.error("iteration %d could not be deleted: %s", iteration, error)
    return deleted


@dataclass(slots=True)
class _Records:
    """What retention reads from the state files of checkpoints.

    Args:
        losses: validation loss by iteration, of those that were evaluated.
        interim: those made where a run was interrupted.
        unknown: those whose state cannot be read now: any of them may be the best.
    """

    losses: dict[int, float] = field(default_factory=dict)
    interim: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)

    @staticmethod
    def of(folder: CheckpointFolder, iterations: Sequence[int]) -> _Records:
        """Read the records of these iterations."""
        records = _Records()
        for iteration in iterations:
            path = path_of(folder.iteration(iteration), STATE)
            try:
                state = json_file.read(path)
            except UnreadableError as error:
                _log.error("iteration %d stays, its loss is not known: %s", iteration, error)
                records.unknown.add(iteration)
                continue
            except TrainerError as error:
                _log.error("%s cannot be read, its loss counts for nothing: %s", path, error)
                continue
            loss = state.get("valid_loss")
            if isinstance(loss, float):  # as a loss is written; `json_file` lets no NaN through
                records.losses[iteration] = float(loss)
            if state.get(INTERIM) is True:
                records.interim.add(iteration)
        return records


def _needed_bytes(layout: Layout) -> int:
    """Return the largest size of a checkpoint: its tensor files, and JSON files that grow with tensors and digests."""
    return layout.total_bytes + (64 << 10) + 1024 * len(layout.places) + layout.total_bytes // (128 << 10)


def give_up_unmirrored(attempt: Attempt, retention: Retention, lock: FolderLock | None) -> None:
    """Delete, on a full disk, what retention keeps for the mirror alone, and name it. Rank 0 only."""
    kept, _ = decide_expired(attempt.folder, retention)
    expired, _ = decide_expired(attempt.folder, replace(retention, mirror=None))
    for iteration in delete(attempt.folder, sorted({*expired} - {*kept}), attempt=attempt.name, lock=lock):
        _log.warning("the disk is full: iteration %d is deleted before the store has it", iteration)


def require_room(
    attempt: Attempt,
    documents: Mapping[str, json_file.Document],
    retention: Retention,
    *,
    parts: int = 1,
    lock: FolderLock | None = None,
) -> None:
    """Refuse to begin where tensors and documents would not fit beside all that is there.

    On a full disk, checkpoints that stay for the mirror alone are deleted first.

    Args:
        retention: of the run that saves, for the advice: it has not deleted anything for this save yet.
        parts: how many folders share the tensors, about evenly.
    """
    folder, files = attempt.folder, attempt.folder.files
    needed = _needed_bytes(attempt.layout) // parts + sum(
        len(data) for data in documents.values() if isinstance(data, bytes)
    )
    try:
        free = files.free_bytes(folder.root)
        # Looked at afterwards: what other ranks reserve meanwhile may count twice, but is never missing.
        allocated = files.allocated_bytes(attempt.partial, *folder.discarded(attempt.name))
    except OSError as error:
        raise folder.cannot_write(error) from error
    if free is not None and free + allocated < needed and retention.mirror is not None:
        give_up_unmirrored(attempt, retention, lock)
        require_room(attempt, documents, replace(retention, mirror=None), parts=parts)
        return
    if free is not None and free + allocated < needed:
        raise CheckpointError(
            "There is no room for a checkpoint",
            where=folder.root,
            expected=f"{needed} B free",
            found=f"{free} B free",
            fix=_advice(folder, retention, short_bytes=needed - free - allocated),
        )


def _advice(folder: CheckpointFolder, retention: Retention, *, short_bytes: int) -> str:
    """Return how to make room: what could be deleted, and by what."""
    older, committed = decide_expired(folder, replace(retention, max_checkpoint_keep=1))
    abandoned, parts = folder.superseded(), []
    if older:
        allocated = folder.files.allocated_bytes(*map(folder.iteration, older))
        name = folder.terms.keep
        parts.append(
            f"{_count(older, 'older checkpoint')} there: {allocated} B, deleted by the next start with {name}=1."
        )
    if abandoned:
        allocated = folder.files.allocated_bytes(*abandoned)
        parts.append(
            f"{_count(abandoned, 'abandoned branch', 'es')} there (*.superseded-*): {allocated} B, to be deleted."
        )
    if not parts:
        reason = ": the newest stays until the next is complete" if committed else ""
        parts.append(f"No checkpoint there can be deleted{reason}.")
    return f"Free {short_bytes} B more, or name {folder.terms.another}. {' '.join(parts)}"


def _count(members: Sequence[object], noun: str, ending: str = "s") -> str:
    return f"{len(members)} {noun}{'' if len(members) == 1 else ending}"
