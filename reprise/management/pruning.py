"""Deletes old checkpoints of a run."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reprise.errors import CheckpointError, ConfigError
from reprise.format.names import HOST, MANIFEST
from reprise.loading.choose import committed_in
from reprise.management.listing import is_whole, size_of
from reprise.management.paths import TERMS, checkpoint_folder
from reprise.saving.policy import Retention
from reprise.storage.files import FILE_SYSTEM
from reprise.storage.folder import CheckpointFolder, FolderTerms, iteration_of
from reprise.storage.lock import FolderLock
from reprise.storage.paths import exists
from reprise.stores.locations import is_stored, location
from reprise.stores.path import StorePath, store_path
from reprise.stores.store import ask
from reprise.stores.url import StoreUrl


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
    if is_stored(place):
        return _prune_stored(store_path(str(place)), Retention(keep, retain_interval), dry_run=dry_run)
    checkpoints = CheckpointFolder(checkpoint_folder(place), FILE_SYSTEM, terms)
    hold = lock_of(checkpoints, dry_run=dry_run)
    with hold as lock, hold:
        committed = committed_in(checkpoints)
        iterations = Retention(keep, retain_interval).expired(committed, pinned=checkpoints.held(committed))
        retained = sorted(set(committed) - set(iterations))
        if iterations:
            _require_whole(checkpoints, retained)
        paths = [checkpoints.iteration(iteration) for iteration in iterations]
        expired = [
            ExpiredCheckpoint(path, n, size_of(path, checkpoints.files))
            for path, n in zip(paths, iterations, strict=True)
        ]
        if lock is not None:
            for iteration in iterations:
                lock.check()
                path = checkpoints.discard(iteration, secrets.token_hex(4))
                if path is None:  # somebody has begun to read it
                    expired = [checkpoint for checkpoint in expired if checkpoint.iteration != iteration]
                    retained = sorted({*retained, iteration})
                else:
                    checkpoints.files.remove_tree(path)
    return PruneReport(tuple(expired), tuple(retained), dry_run)


def _prune_stored(path: StorePath, retention: Retention, *, dry_run: bool) -> PruneReport:
    url = StoreUrl.parse(str(path))
    folders = dict[int, tuple[str, int]]()
    for name in ask(url, "names")[0]:
        iteration, sizes = iteration_of(Path(name)), {file: status.st_size for file, status in (path / name).objects()}
        if iteration is not None and MANIFEST in sizes:
            folders[iteration] = name, sum(sizes.values())
    iterations = retention.expired(folders)
    for iteration in () if dry_run else iterations:
        ask(url.child(folders[iteration][0]), "remove")
    expired = tuple(ExpiredCheckpoint(path / folders[n][0], n, folders[n][1]) for n in iterations)
    return PruneReport(expired, tuple(sorted(folders.keys() - set(iterations))), dry_run)


def lock_of(folder: CheckpointFolder, *, dry_run: bool) -> FolderLock | contextlib.nullcontext[None]:
    """Return the lock of a checkpoint folder, to be entered twice; without a lock for a dry run."""
    if dry_run:
        return contextlib.nullcontext()
    return FolderLock(folder.root, secrets.token_hex(4), files=folder.files)


def _require_whole(folder: CheckpointFolder, retained: Sequence[int]) -> None:
    """Refuse to delete checkpoints where none of the others is whole."""
    paths = [folder.iteration(iteration) for iteration in retained]
    if not any(is_whole(path, folder.files) for path in paths):
        is_of_host = any(exists(path / HOST) for path in paths)
        raise CheckpointError(
            "None of the checkpoints that would stay is whole",
            where=folder.root,
            found=list(retained),
            fix=f"The folder of one host holds parts; its run deletes by {folder.terms.keep}." if is_of_host else None,
        )
