"""Drops the optimizer's state of old checkpoints of a run, which stay as checkpoints of the weights."""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from reprise.errors import CheckpointError, ConfigError
from reprise.format.layout import TensorKind, kind_of_file
from reprise.format.mirror_record import MIRROR, from_bytes
from reprise.format.names import HOST, OPTIMIZER_DROPPED
from reprise.loading.choose import committed_in
from reprise.loading.reader import Checkpoint, open_checkpoint
from reprise.management.listing import is_whole
from reprise.management.paths import TERMS, checkpoint_folder
from reprise.management.pruning import lock_of
from reprise.storage.files import FILE_SYSTEM
from reprise.storage.folder import CheckpointFolder, FolderTerms
from reprise.storage.lock import FolderLock
from reprise.storage.paths import read_regular
from reprise.stores.locations import is_stored, location


@dataclass(frozen=True, slots=True)
class LightenedCheckpoint:
    """A checkpoint whose optimizer's state is dropped, and the size of the files that are.

    Args:
        reason: why it stays as it is; empty for a checkpoint that is lighter, or would be.
    """

    path: Path
    iteration: int
    dropped_bytes: int
    reason: str = ""


def drop_optimizer(
    folder: str | Path, *, before: int, dry_run: bool = False, terms: FolderTerms = TERMS
) -> tuple[LightenedCheckpoint, ...]:
    """Drop the optimizer's state of a run's checkpoints before an iteration: the weights stay, with their digests.

    The folder is locked meanwhile. A checkpoint loses its folder `optimizer` by one rename, after it got an empty file
    `optimizer_dropped`, and keeps all other files. Moving averages are state of the optimizer. A checkpoint that is
    held, or that the folder's mirror has yet to take, stays as it is. The mirror keeps what it has.

    Args:
        folder: of a run, or of its checkpoints.
        before: the first iteration that stays as it is.
        dry_run: change nothing.
        terms: the names of the caller's settings in advice.

    Returns:
        The checkpoints before the iteration that have an optimizer's state.

    Raises:
        ConfigError: for a URL.
        CheckpointError: if there is no such folder, none of the others with an optimizer's state is whole, a checkpoint
            is damaged, has the tensors of a state dict or is the part of one host, or the folder cannot be written.
        LockError: if a run saves to the folder.
    """
    place = location(folder)
    if is_stored(place):
        raise ConfigError(
            "The optimizer's state is dropped in folders, not in a store",
            where=place,
            fix="Drop it in the folder of the run.",
        )
    checkpoints = CheckpointFolder(checkpoint_folder(place), FILE_SYSTEM, terms)
    hold = lock_of(checkpoints, dry_run=dry_run)
    try:
        with hold as lock, hold:
            if lock is not None:
                checkpoints.sweep()
            return _drop(checkpoints, before, lock)
    except OSError as error:
        raise checkpoints.cannot_write(error) from error


def _drop(folder: CheckpointFolder, before: int, lock: FolderLock | None) -> tuple[LightenedCheckpoint, ...]:
    committed = committed_in(folder)
    full = [
        checkpoint
        for iteration in committed
        if iteration < before
        if (checkpoint := open_checkpoint(folder.iteration(iteration), folder.files)).has_optimizer
    ]
    reasons = {checkpoint.path: _reason(folder, checkpoint) for checkpoint in full}
    lighter = [checkpoint for checkpoint in full if not reasons[checkpoint.path]]
    _require_full(folder, {folder.iteration(n) for n in committed} - {checkpoint.path for checkpoint in lighter})
    sizes = {checkpoint.path: _optimizer_bytes(checkpoint) for checkpoint in full}
    for checkpoint in lighter:
        if lock is not None and not _rename_away(folder, checkpoint, lock):
            reasons[checkpoint.path] = "held"
    return tuple(LightenedCheckpoint(c.path, c.iteration, sizes[c.path], reasons[c.path]) for c in full)


def _reason(folder: CheckpointFolder, checkpoint: Checkpoint) -> str:
    """Return why a checkpoint must stay as it is, or an empty string."""
    if folder.held([checkpoint.iteration]):
        return "held"
    with contextlib.suppress(FileNotFoundError):
        record = from_bytes(read_regular(folder.root / MIRROR), where=folder.root / MIRROR)
        names = [folder.iteration(iteration).name for iteration in folder.committed()]
        if record.awaits(checkpoint.path.name, checkpoint.digest, names):
            return f"not in {record.url} yet"
    return ""


def _require_full(folder: CheckpointFolder, paths: set[Path]) -> None:
    """Refuse to leave a run without a whole checkpoint to resume from."""
    for path in sorted(paths, reverse=True):
        if is_whole(path, folder.files) and open_checkpoint(path, folder.files).has_optimizer:
            return
    raise CheckpointError(
        "None of the checkpoints that would stay has an optimizer's state and is whole",
        where=folder.root,
        fix="Name an iteration up to that of the newest whole checkpoint.",
    )


def _optimizer_bytes(checkpoint: Checkpoint) -> int:
    """Return the size of the optimizer's files.

    Raises:
        CheckpointError: for a checkpoint of another kind than a model's with an optimizer.
    """
    sizes = Counter[TensorKind]()
    for name, entry in checkpoint.manifest.files.items():
        sizes[kind_of_file(name)] += entry.total_bytes
    if checkpoint.host is not None or TensorKind.EXTRA in sizes or "groups" in checkpoint.state:
        raise CheckpointError(
            "The optimizer's state of this checkpoint cannot be dropped",
            where=checkpoint.path,
            expected="a checkpoint of a training run in a shared folder",
            found=f"{HOST}: a part on one host" if checkpoint.host is not None else "one that a program saved",
        )
    return sizes[TensorKind.OPTIMIZER]


def _rename_away(folder: CheckpointFolder, checkpoint: Checkpoint, lock: FolderLock) -> bool:
    """Rename the optimizer's folder out of a checkpoint, whose marker explains its absence, and delete it.

    Returns:
        False for a checkpoint that is held by now, also by a reader who began during the rename: it keeps its files.
    """
    files, path = folder.files, checkpoint.path
    files.write_whole(path / OPTIMIZER_DROPPED, b"")
    files.sync_folder(path)
    lock.check()
    leaving = folder.leaving(checkpoint.iteration, f"{secrets.token_hex(4)}-light")  # swept, if this is killed
    optimizer = path / TensorKind.OPTIMIZER.value
    if not folder.hide(optimizer, leaving, held=path):
        files.remove_file(path / OPTIMIZER_DROPPED)
        return False
    files.sync_folder(path)
    files.sync_folder(folder.root)
    files.remove_tree(leaving)
    return True
