"""Drops the optimizer's state of old checkpoints of a run, which stay as checkpoints of the weights."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from reprise import json_file
from reprise.errors import CheckpointError, ConfigError
from reprise.format import manifest
from reprise.format.layout import TensorKind
from reprise.format.manifest import FileEntry, Manifest
from reprise.format.mirror_record import MIRROR, from_bytes
from reprise.format.names import HOST, MANIFEST, OPTIMIZER_DROPPED, STATE
from reprise.loading.choose import committed_in
from reprise.loading.reader import Checkpoint, open_checkpoint, read_file, read_places
from reprise.management.listing import is_whole
from reprise.management.paths import TERMS, checkpoint_folder
from reprise.management.pruning import lock_of
from reprise.paths import read_regular
from reprise.storage.files import FILE_SYSTEM, Files
from reprise.storage.folder import CheckpointFolder, FolderTerms
from reprise.storage.lock import FolderLock
from reprise.stores.location import is_stored, location

_COPY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class LightenedCheckpoint:
    """A checkpoint whose optimizer's state is dropped, and the bytes of its tensors that are.

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

    The folder is locked meanwhile. Each checkpoint is replaced as a whole, as by a save of its iteration. Moving
    averages are state of the optimizer. A checkpoint that is held, or that the folder's mirror has yet to take, stays
    as it is. The mirror uploads the lighter ones in place of the others.

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
            fix="Drop it in the folder of the run: its mirror uploads the lighter checkpoints.",
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
    results = []
    for checkpoint in full:
        tensors = _optimizer_tensors(checkpoint)
        if checkpoint in lighter and lock is not None:
            _replace(folder, checkpoint, tensors, lock)
        dropped = sum(tensors.values())
        results.append(LightenedCheckpoint(checkpoint.path, checkpoint.iteration, dropped, reasons[checkpoint.path]))
    return tuple(results)


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


def _optimizer_tensors(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the names and sizes of the optimizer's tensors.

    Raises:
        CheckpointError: for a checkpoint of another kind than a model's with an optimizer.
    """
    places = read_places(checkpoint).values()
    kinds = {place.spec.kind for place in places}
    if checkpoint.host is not None or TensorKind.EXTRA in kinds or "groups" in checkpoint.state:
        raise CheckpointError(
            "The optimizer's state of this checkpoint cannot be dropped",
            where=checkpoint.path,
            expected="a checkpoint of a training run in a shared folder",
            found=f"{HOST}: a part on one host" if checkpoint.host is not None else "one that a program saved",
        )
    return {place.spec.name: place.spec.total_bytes for place in places if place.spec.kind is TensorKind.OPTIMIZER}


def _replace(folder: CheckpointFolder, checkpoint: Checkpoint, dropped: Collection[str], lock: FolderLock) -> None:
    """Replace a checkpoint by one without these tensors, whose other files and digests are the same."""
    files, attempt = folder.files, f"{secrets.token_hex(4)}-light"
    target = folder.partial(checkpoint.iteration, attempt)
    places = read_places(checkpoint)
    heavy = {places[name].file for name in dropped}
    entries = {name: entry for name, entry in checkpoint.manifest.files.items() if name not in heavy}
    state = {**checkpoint.state, OPTIMIZER_DROPPED: {"manifest_xxh3_64": checkpoint.digest}}
    documents = {STATE: json_file.content(state)}
    entries[STATE] = FileEntry(len(documents[STATE]), manifest.digest_of(documents[STATE]), is_tensor_file=False)
    tensors = {name: entry for name, entry in checkpoint.manifest.tensors.items() if name not in dropped}
    documents[MANIFEST] = manifest.to_bytes(Manifest(attempt, entries, tensors, checkpoint.manifest.aliases))
    documents |= {
        name: read_file(checkpoint, name)
        for name, entry in entries.items()
        if name != STATE and not entry.is_tensor_file
    }
    try:
        files.make_folder(target)
        for name, entry in entries.items():
            if entry.is_tensor_file:
                files.make_folder((target / name).parent)
                _copy(files, checkpoint.path / name, target / name, entry.total_bytes)
        for name, data in documents.items():
            files.make_folder((target / name).parent)
            files.write_whole(target / name, data)
        files.copy_times(checkpoint.path / MANIFEST, target / MANIFEST)  # the age of the save, which ls shows
        folders = {(target / name).parent for name in (*entries, MANIFEST)}
        files.sync_together([partial(files.sync_folder, path) for path in folders])
        lock.check()
        folder.commit(checkpoint.iteration, attempt, replaces=True)
    finally:
        files.remove_tree(target)  # gone, once it has its name


def _copy(files: Files, source: Path, target: Path, total_bytes: int) -> None:
    reader, writer = files.open_for_reading(source), files.open_for_writing(target)
    try:
        files.reserve(writer, total_bytes)
        for offset in range(0, total_bytes, _COPY_BYTES):
            data = memoryview(bytearray(min(_COPY_BYTES, total_bytes - offset)))
            if files.read(reader, data, offset=offset) != len(data):
                raise CheckpointError("A file ended early", where=source, expected=f"{total_bytes} B")
            files.write(writer, [data], offset=offset)
        files.sync(writer)
    finally:
        files.close(reader)
        files.close(writer)
