"""Deletes what a run's retention does not keep, and requires room for its next save."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from reprise.commit.attempt import Attempt
from reprise.errors import CheckpointError, LockError, TrainerError, UnreadableError
from reprise.format.names import INTERIM, STATE
from reprise.saving.policy import Retention
from reprise.storage import json_file
from reprise.storage.files import describe_free_space
from reprise.storage.folder import CheckpointFolder
from reprise.storage.lock import FolderLock

_log = logging.getLogger(__name__)


def decide_expired(folder: CheckpointFolder, retention: Retention, *, pinned: Collection[int] = ()) -> list[int]:
    """Return the iterations expired by retention. Empty if listing fails.

    Args:
        pinned: Iterations to keep in addition to held ones.
    """
    losses, interim, kept = dict[int, float | None](), set[int](), {*pinned}
    try:
        committed = folder.committed()
        for iteration in committed if retention.max_checkpoint_keep else ():
            path = folder.iteration(iteration)
            try:
                status = path.lstat()
                losses[iteration], is_interim = _record_of(path, status.st_ino, status.st_mtime_ns)
                interim |= {iteration} if is_interim else set()
            except (FileNotFoundError, TrainerError) as error:
                kept |= {iteration} if isinstance(error, UnreadableError) else set()  # it may be the best
                _log.error("the validation loss of %s cannot be read: %s", path, error)
        expired = retention.expired(committed, pinned=kept, losses=losses, interim=interim)
        protected = {*folder.held(expired)}
    except OSError as error:
        _log.error("%s cannot be listed, nothing is deleted: %s", folder.root, error)
        return []
    if retention.mirror is not None and expired:
        protected |= {*retention.mirror.unmirrored(folder.root, committed, expired)}
    return [iteration for iteration in expired if iteration not in protected]


def delete(folder: CheckpointFolder, iterations: Sequence[int], *, attempt: str, lock: FolderLock | None) -> list[int]:
    """Delete committed iterations and return the deleted ones; log the others. Leaders only.

    An iteration with a hold by now stays.

    Args:
        attempt: A name for the folders being deleted, never used before in this folder.
        lock: Checked again before each deletion.
    """
    deleted = []
    for iteration in iterations:
        try:
            if lock is not None:
                lock.check()
            if folder.delete(folder.iteration(iteration), attempt):
                deleted.append(iteration)
            else:
                _log.info("iteration %d is kept, since a reader now holds it", iteration)
        except (OSError, LockError) as error:
            _log.error("iteration %d could not be deleted: %s", iteration, error)
    return deleted


@functools.lru_cache(maxsize=1 << 16)
def _record_of(path: Path, _inode: int, _modified_ns: int) -> tuple[float | None, bool]:
    """Return a checkpoint's validation loss, and whether the checkpoint is interim.

    Results are cached, since a run reads all its checkpoints after every save and they do not change. A checkpoint
    saved again lies in a new folder.

    Args:
        _inode: The folder's inode, part of the cache key. It alone is not unique: a freed inode is reused.
        _modified_ns: The folder's modification time, part of the cache key.

    Raises:
        TrainerError: The state cannot be read. Nothing is cached.
    """
    state = json_file.read(path / STATE)
    loss = state.get("valid_loss")
    # Losses are written as floats; `json_file` rejects NaN.
    return (float(loss) if isinstance(loss, float) else None), state.get(INTERIM) is True


def require_room(
    attempt: Attempt,
    documents: Mapping[str, json_file.Document],
    retention: Retention,
    *,
    parts: int = 1,
    lock: FolderLock | None = None,
) -> None:
    """Fail if tensors and documents would not fit on the disk beside the present files.

    On a full disk, checkpoints kept only until the mirror has them are deleted first.

    Args:
        retention: The run's retention, which has not yet deleted anything for this save.
        parts: How many folders share the tensors, about evenly.

    Raises:
        CheckpointError: There is too little space, or it cannot be measured.
    """
    folder, files, layout = attempt.folder, attempt.folder.files, attempt.layout
    # An upper bound: tensor files, and JSON files in proportion to tensors and digests.
    json_bytes = (64 << 10) + 1024 * len(layout.places) + layout.total_bytes // (128 << 10)
    needed = (layout.total_bytes + json_bytes) // parts
    needed += sum(len(data) for data in documents.values() if isinstance(data, bytes))

    def missing_bytes() -> int:
        with folder.writing():
            free = files.free_bytes(folder.root)
            # Measured second: blocks that other ranks reserve meanwhile may count twice, but are never missed.
            return 0 if free is None else needed - free - files.allocated_bytes(attempt.partial)

    if retention.mirror is not None and missing_bytes() > 0:
        expired = decide_expired(folder, replace(retention, mirror=None))
        for iteration in delete(folder, expired, attempt=attempt.name, lock=lock):
            _log.warning("the disk is full: deleted iteration %d, which the store may not have yet", iteration)
    if (missing := missing_bytes()) > 0:
        raise CheckpointError(
            "There is no room for a checkpoint",
            where=folder.root,
            expected=f"{needed} B free",
            found=describe_free_space(files, folder.root),
            fix=f"Free {missing} B more: delete abandoned branches (*.superseded-*), restart with "
            f"{folder.terms.keep}=1, which deletes older checkpoints, or name {folder.terms.another}.",
        )
