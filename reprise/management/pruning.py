"""Deletes old checkpoints of a run, or drops the optimizer's state of old ones, which stay as the weights alone."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from reprise.errors import CheckpointError, ConfigError
from reprise.format.layout import TensorKind, kind_of_file
from reprise.format.mirror_record import MIRROR, from_bytes
from reprise.format.names import HOST, MANIFEST, OPTIMIZER_DROPPED, OPTIMIZER_FILES
from reprise.loading.choose import committed_in
from reprise.loading.reader import Checkpoint, open_checkpoint
from reprise.management.listing import size_of, whole_checkpoint
from reprise.management.paths import TERMS, checkpoint_folder
from reprise.saving.policy import Retention
from reprise.storage.files import FILE_SYSTEM
from reprise.storage.folder import CheckpointFolder, FolderTerms, iteration_of
from reprise.storage.lock import FolderLock
from reprise.storage.paths import exists, read_regular
from reprise.stores.locations import is_stored, location
from reprise.stores.path import StorePath
from reprise.stores.store import ask


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
        expired: the deleted checkpoints, or those to delete, in order.
        retained: the iterations that stay.
        is_dry_run: whether none was deleted.
    """

    expired: tuple[ExpiredCheckpoint, ...]
    retained: tuple[int, ...]
    is_dry_run: bool


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


def prune(
    folder: str | Path,
    *,
    keep: int,
    retain_interval: int = 0,
    dry_run: bool = False,
    terms: FolderTerms = TERMS,
) -> PruneReport:
    """Delete all checkpoints but the newest, those that are held, and every multiple of an interval.

    The folder is locked meanwhile, so a run with saves to it is not disturbed.

    In a store, the manifest of a checkpoint goes first: from then on there is none. Holds protect nothing there.

    Args:
        folder: of a run, or of its checkpoints; in a store, the URL of the run.
        keep: the number of newest checkpoints kept, at least 1.
        retain_interval: multiples of this iteration stay too; 0 for none.
        dry_run: delete none.
        terms: the names of the caller's settings in advice.

    Raises:
        ConfigError: for a number out of range.
        CheckpointError: if there is no such folder, or no checkpoint to keep is whole.
        LockError: if a run saves to the folder.
        OSError: if the folder cannot be read or written.
    """
    if keep < 1 or retain_interval < 0:
        raise ConfigError(
            "No checkpoint can be deleted by these numbers",
            expected="keep of at least 1, retain_interval of at least 0",
            found=f"keep={keep}, retain_interval={retain_interval}",
        )
    place = location(folder)
    if isinstance(place, StorePath):
        return _prune_stored(place, Retention(keep, retain_interval), dry_run=dry_run)
    with _owned(place, terms, dry_run=dry_run) as (checkpoints, lock):
        committed = committed_in(checkpoints)
        iterations = Retention(keep, retain_interval).expired(committed, pinned=checkpoints.held(committed))
        if iterations:
            _require_whole(checkpoints, set(committed) - set(iterations))
        expired = list[ExpiredCheckpoint]()
        for iteration in iterations:
            checkpoint = ExpiredCheckpoint(
                path := checkpoints.iteration(iteration), iteration, size_of(path, checkpoints.files)
            )
            if lock is not None:
                lock.check()
                leaving = checkpoints.discard(iteration, secrets.token_hex(4))
                if leaving is None:  # somebody has begun to read it
                    continue
                checkpoints.files.remove_tree(leaving)
            expired.append(checkpoint)
    retained = set(committed) - {checkpoint.iteration for checkpoint in expired}
    return PruneReport(tuple(expired), tuple(sorted(retained)), dry_run)


def _prune_stored(path: StorePath, retention: Retention, *, dry_run: bool) -> PruneReport:
    folders = dict[int, tuple[str, int]]()
    for name in ask(path.url, "names")[0]:
        if (iteration := iteration_of(Path(name))) is None:
            continue
        sizes = {file: status.st_size for file, status in (path / name).objects()}
        if MANIFEST in sizes:
            folders[iteration] = name, sum(sizes.values())
    iterations = retention.expired(folders)
    for iteration in () if dry_run else iterations:
        ask((path / folders[iteration][0]).url, "remove")
    expired = tuple(ExpiredCheckpoint(path / folders[n][0], n, folders[n][1]) for n in iterations)
    return PruneReport(expired, tuple(sorted(folders.keys() - set(iterations))), dry_run)


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
    with _owned(place, terms, dry_run=dry_run) as (checkpoints, lock):
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
        names = [folder.iteration(iteration).name for iteration in folder.committed()]
        if record.awaits(checkpoint.path.name, checkpoint.digest, names):
            return f"not in {record.url} yet"
    return ""


def _optimizer_bytes(checkpoint: Checkpoint) -> int:
    """Return the size of the optimizer's files.

    Raises:
        CheckpointError: for a checkpoint of another kind than a model's with an optimizer.
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
    """Rename the optimizer's folder out of a checkpoint, whose marker explains its absence, and delete it.

    Returns:
        False for a checkpoint that is held by now, also by a reader who began during the rename: it keeps its files.
    """
    files, path = folder.files, checkpoint.path
    files.write_whole(path / OPTIMIZER_DROPPED, b"")
    files.sync_folder(path)
    lock.check()
    leaving = folder.leaving(checkpoint.iteration, f"{secrets.token_hex(4)}-light")  # swept, if this is killed
    optimizer = path / OPTIMIZER_FILES
    if not folder.hide(optimizer, leaving, held=path):
        files.remove_file(path / OPTIMIZER_DROPPED)
        return False
    files.sync_folder(path)
    files.sync_folder(folder.root)
    files.remove_tree(leaving)
    return True


@contextlib.contextmanager
def _owned(place: Path, terms: FolderTerms, *, dry_run: bool) -> Iterator[tuple[CheckpointFolder, FolderLock | None]]:
    """Yield the checkpoint folder at a place, and its lock, held meanwhile; no lock for a dry run.

    Raises:
        CheckpointError: if the folder cannot be written, also by the block.
    """
    folder = CheckpointFolder(checkpoint_folder(place), FILE_SYSTEM, terms)
    lock = None if dry_run else FolderLock(folder.root, secrets.token_hex(4), files=folder.files)
    hold = contextlib.nullcontext() if lock is None else lock
    try:
        with hold, hold:
            yield folder, lock
    except OSError as error:
        raise folder.cannot_write(error) from error


def _require_whole(folder: CheckpointFolder, retained: Iterable[int], *, has_optimizer: bool = False) -> None:
    """Refuse to delete where none of the others is whole, with an optimizer's state if asked for."""
    paths = [folder.iteration(iteration) for iteration in sorted(retained, reverse=True)]
    for path in paths:
        checkpoint = whole_checkpoint(path, folder.files)
        if checkpoint is not None and (checkpoint.has_optimizer or not has_optimizer):
            return
    fix = f"The folder of one host holds parts; its run deletes by {folder.terms.keep}."
    if has_optimizer:
        fix = "Name an iteration up to that of the newest whole checkpoint."
    raise CheckpointError(
        f"None of the checkpoints that would stay {'has an optimizer and ' * has_optimizer}is whole",
        where=folder.root,
        found=[path.name for path in paths],
        fix=fix if has_optimizer or any(exists(path / HOST) for path in paths) else None,
    )
