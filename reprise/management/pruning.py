"""Deletes a run's old checkpoints, or drops their optimizer state, which leaves the weights."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from reprise.errors import CheckpointError, ConfigError
from reprise.format.layout import TensorKind, kind_of_file
from reprise.format.mirror_record import MIRROR, from_bytes
from reprise.format.names import HOST, OPTIMIZER_DROPPED, OPTIMIZER_FILES
from reprise.loading.blocks import check_first_blocks
from reprise.loading.choose import committed_in
from reprise.loading.reader import Checkpoint, open_checkpoint
from reprise.management.listing import size_of
from reprise.management.paths import checkpoint_folder, examined
from reprise.management.summary import CheckpointStatus
from reprise.saving.policy import Retention
from reprise.storage.files import FILE_SYSTEM
from reprise.storage.folder import CheckpointFolder
from reprise.storage.lock import FolderLock
from reprise.storage.paths import read_regular
from reprise.stores.locations import files_of, is_stored, location
from reprise.stores.store import CHILD_CLIENT
from reprise.stores.upload import remove


@dataclass(frozen=True, slots=True)
class ExpiredCheckpoint:
    """A checkpoint retained by no rule, and its size in bytes."""

    path: Path
    iteration: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class PruneReport:
    """The result of pruning a folder.

    Args:
        expired: The deleted checkpoints in order. In a dry run, the ones to delete.
        retained: The remaining iterations.
        is_dry_run: Whether this was a dry run, which deletes nothing.
    """

    expired: tuple[ExpiredCheckpoint, ...]
    retained: tuple[int, ...]
    is_dry_run: bool


@dataclass(frozen=True, slots=True)
class LightenedCheckpoint:
    """A checkpoint whose optimizer state is dropped, and the dropped files' size.

    Args:
        reason: Why it stays as it is. Empty if the state is dropped, or would be.
    """

    path: Path
    iteration: int
    dropped_bytes: int
    reason: str = ""


def prune(
    folder: str | Path,
    *,
    keep: int,
    retain_interval: int = 0,
    dry_run: bool = False,
) -> PruneReport:
    """Delete all checkpoints except the newest, held ones, and multiples of an interval.

    The folder is locked meanwhile, so a run saving to it is not disturbed.

    In a store, a checkpoint's manifest is deleted first: from then on there is no checkpoint. Holds do not protect
    there. A folder or store without checkpoints gives an empty report.

    Args:
        folder: A run's folder, its checkpoint folder, or its URL in a store.
        keep: How many of the newest checkpoints to keep, at least 1.
        retain_interval: Also keep multiples of this iteration. 0 keeps none.
        dry_run: Delete nothing.

    Raises:
        ConfigError: A number is out of range.
        CheckpointError: There is no such folder, or none of the checkpoints to keep is whole.
        LockError: A run is saving to the folder.
        OSError: The folder cannot be read or written.
    """
    if keep < 1 or retain_interval < 0:
        raise ConfigError(
            "No checkpoint can be deleted by these numbers",
            expected="keep of at least 1, retain_interval of at least 0",
            found=f"keep={keep}, retain_interval={retain_interval}",
        )
    place, retention = location(folder), Retention(keep, retain_interval)
    is_remote, deleted = is_stored(place), list[ExpiredCheckpoint]()
    with _owned(place, dry_run=dry_run) as (checkpoints, lock):
        committed = committed_in(checkpoints)
        expired = retention.expired(committed, pinned=() if is_remote else checkpoints.held(committed))
        if expired and not is_remote:
            _require_whole(checkpoints, {*committed} - {*expired})
        for iteration in expired:
            path = checkpoints.iteration(iteration)
            checkpoint = ExpiredCheckpoint(path, iteration, size_of(path))
            if dry_run or _delete(checkpoints, path, lock):
                deleted.append(checkpoint)
    retained = {*committed} - {checkpoint.iteration for checkpoint in deleted}
    return PruneReport(tuple(deleted), tuple(sorted(retained)), dry_run)


def _delete(folder: CheckpointFolder, path: Path, lock: FolderLock | None) -> bool:
    """Delete a checkpoint, in a store without a lock. Return whether it is gone: a reader may have started on it."""
    if lock is None:
        remove(CHILD_CLIENT, path)
        return True
    lock.check()
    return folder.delete(path, secrets.token_hex(4))


def drop_optimizer(folder: str | Path, *, before: int, dry_run: bool = False) -> tuple[LightenedCheckpoint, ...]:
    """Drop the optimizer state from a run's checkpoints before an iteration. The weights stay, with their digests.

    The folder is locked meanwhile. Each checkpoint gets an empty file `optimizer_dropped`, then loses its folder
    `optimizer` by one rename, and keeps all other files. Moving averages belong to the optimizer state. A held
    checkpoint stays as it is, and so does one that the folder's mirror has yet to upload. The mirror keeps its copies.

    Args:
        folder: A run's folder, or its checkpoint folder.
        before: The first iteration to leave unchanged.
        dry_run: Change nothing.

    Returns:
        The checkpoints with optimizer state before the iteration.

    Raises:
        ConfigError: `folder` is a URL.
        CheckpointError: There is no such folder, no remaining checkpoint with optimizer state is whole, a checkpoint is
            damaged, holds a state dict or is a single host's part, or the folder cannot be written.
        LockError: A run is saving to the folder.
    """
    place = location(folder)
    if is_stored(place):
        raise ConfigError(
            "The optimizer's state is dropped in folders, not in a store",
            where=place,
            fix="Drop it in the folder of the run.",
        )
    with _owned(place, dry_run=dry_run) as (checkpoints, lock):
        if lock is not None:
            checkpoints.sweep()
        return _drop(checkpoints, before, lock)


def _drop(folder: CheckpointFolder, before: int, lock: FolderLock | None) -> tuple[LightenedCheckpoint, ...]:
    committed = committed_in(folder)
    old = (open_checkpoint(folder.iteration(iteration), folder.files) for iteration in committed if iteration < before)
    full = [
        LightenedCheckpoint(
            checkpoint.path, checkpoint.iteration, _optimizer_bytes(checkpoint), _reason(folder, checkpoint)
        )
        for checkpoint in old
        if checkpoint.has_optimizer
    ]
    _require_whole(folder, set(committed) - {c.iteration for c in full if not c.reason}, has_optimizer=True)
    if lock is None:
        return tuple(full)
    return tuple(c if c.reason or _rename_away(folder, c, lock) else replace(c, reason="held") for c in full)


def _reason(folder: CheckpointFolder, checkpoint: Checkpoint) -> str:
    """Return why a checkpoint must stay as it is, or an empty string."""
    if folder.held([checkpoint.iteration]):
        return "held"
    with contextlib.suppress(FileNotFoundError):
        record = from_bytes(read_regular(folder.root / MIRROR), where=folder.root / MIRROR)
        if record.rule.unmirrored(folder.root, folder.committed(), [checkpoint.iteration], at_end=True):
            return f"not in {record.rule.url} yet"
    return ""


def _optimizer_bytes(checkpoint: Checkpoint) -> int:
    """Return the size of the optimizer files in bytes.

    Raises:
        CheckpointError: The checkpoint does not hold a model with its optimizer.
    """
    sizes = {name: entry.total_bytes for name, entry in checkpoint.manifest.files.items()}
    has_others = any(kind_of_file(name) is TensorKind.EXTRA for name in sizes) or "groups" in checkpoint.state
    if checkpoint.host is not None or has_others:
        raise CheckpointError(
            "The optimizer's state of this checkpoint cannot be dropped",
            where=checkpoint.path,
            expected="a checkpoint of a training run in a shared folder",
            found=f"{HOST}: a part on one host" if checkpoint.host is not None else "one that a program saved",
        )
    return sum(size for name, size in sizes.items() if name.startswith(OPTIMIZER_FILES))


def _rename_away(folder: CheckpointFolder, checkpoint: LightenedCheckpoint, lock: FolderLock) -> bool:
    """Rename the optimizer folder out of a checkpoint, whose marker explains its absence, and delete it.

    Returns:
        False if the checkpoint is held by now, also by a reader who started during the rename. It keeps its files.
    """
    files, path = folder.files, checkpoint.path
    files.write_whole(path / OPTIMIZER_DROPPED, b"")
    files.sync_folder(path)
    lock.check()
    if folder.delete(path / OPTIMIZER_FILES, f"{secrets.token_hex(4)}-light", inside=path):
        return True
    files.remove(path / OPTIMIZER_DROPPED)
    return False


@contextlib.contextmanager
def _owned(place: Path, *, dry_run: bool) -> Iterator[tuple[CheckpointFolder, FolderLock | None]]:
    """Yield the checkpoint folder at a place, and its lock, held meanwhile. A dry run and a store have no lock.

    Raises:
        CheckpointError: The folder cannot be written, here or in the block.
        OSError: The store fails, here or in the block.
    """
    if is_stored(place):
        yield CheckpointFolder(place, files_of(place)), None
        return
    folder = CheckpointFolder(checkpoint_folder(place), FILE_SYSTEM)
    lock = None if dry_run else FolderLock(folder.root, secrets.token_hex(4))
    hold = contextlib.nullcontext() if lock is None else lock
    with folder.writing(), hold, hold:
        yield folder, lock


def _require_whole(folder: CheckpointFolder, retained: Iterable[int], *, has_optimizer: bool = False) -> None:
    """Refuse to delete unless a remaining checkpoint is whole, with optimizer state if `has_optimizer`."""
    paths = [folder.iteration(iteration) for iteration in sorted(retained, reverse=True)]
    for path in paths:
        status, _, checkpoint = examined(path, check_first_blocks)
        if checkpoint and status is CheckpointStatus.WHOLE and (checkpoint.has_optimizer or not has_optimizer):
            return
    raise CheckpointError(
        f"None of the checkpoints that would stay {'has an optimizer and ' * has_optimizer}is whole",
        where=folder.root,
        found=[path.name for path in paths],
    )
