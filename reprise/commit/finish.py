"""Turns an attempt whose parts are all written into a checkpoint: JSON files, manifest, sync, rename. Leaders only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from reprise import json_file
from reprise.commit.attempt import Attempt
from reprise.errors import CheckpointError
from reprise.format import host_file, manifest
from reprise.format.host_file import HostFile
from reprise.format.layout import TensorKind, model_index
from reprise.format.manifest import FileEntry, Manifest, WrittenPiece
from reprise.format.names import HOST, INDEX, MANIFEST
from reprise.storage.files import describe_free_space
from reprise.storage.lock import FolderLock


def json_files(
    attempt: Attempt,
    written: Sequence[Sequence[WrittenPiece]],
    *,
    documents: Mapping[str, json_file.Document],
    aliases: Mapping[str, str],
    is_local: bool = False,
) -> dict[str, bytes]:
    """Check that the pieces tile every tensor, and return all JSON files by name, the manifest after what it lists.

    Args:
        written: the pieces of each rank.
        is_local: whether hosts have folders of their own; the last file is then `host.json`, as rank 0's host has it.

    Raises:
        CheckpointError: if the pieces do not tile.
    """
    tensors = manifest.tile(attempt.layout, [piece for pieces in written for piece in pieces])
    entries = {
        file.name: FileEntry(file.total_bytes, manifest.digest_of(file.header), is_tensor_file=True)
        for file in attempt.layout.files
    }
    found: dict[str, bytes] = {}
    has_adapters = any(place.spec.kind is TensorKind.ADAPTER for place in attempt.layout.places.values())
    index: dict[str, json_file.Document] = {} if has_adapters else {INDEX: model_index(attempt.layout)}
    for name, document in {**index, **documents}.items():
        found[name] = json_file.content(document)
        entries[name] = FileEntry(len(found[name]), manifest.digest_of(found[name]), is_tensor_file=False)
    found[MANIFEST] = manifest.to_bytes(Manifest(attempt.name, entries, tensors, aliases))
    if is_local:
        by_host = {
            number: [piece for rank in ranks for piece in written[rank]]
            for number, ranks in enumerate(attempt.hosts.ranks)
        }
        itemsizes = {name: place.spec.dtype.itemsize for name, place in attempt.layout.places.items()}
        writers = host_file.writers_of(tensors, itemsizes, by_host)
        digest = manifest.digest_of(found[MANIFEST])
        found[HOST] = HostFile(attempt.name, digest, 0, attempt.hosts.names, writers, {}).to_bytes()
    return found


def of_host(files: Mapping[str, bytes], host: int) -> dict[str, bytes]:
    """Return rank 0's JSON files as the host with this number has them: `host.json` lists the pieces of its ranks."""
    found = dict(files)
    if HOST in found:
        known = host_file.from_bytes(found[HOST], where=HOST)
        known = replace(known, host=host, held=known.written_by(host))
        found[HOST] = known.to_bytes()
        found = {host_file.stored_name(name, is_whole=known.is_whole): data for name, data in found.items()}
    return found


def prepare(attempt: Attempt, found: Mapping[str, bytes], *, lock: FolderLock | None) -> None:
    """Write the JSON files into the folder of this host, and sync them together with all names in it.

    The syncs have no order among themselves: until the rename, which comes after all of them, nothing reads the folder.

    Raises:
        CheckpointError: if the lock is lost, or the file system fails.
    """
    files, folder = attempt.folder.files, attempt.partial
    try:
        with contextlib.ExitStack() as ending:
            syncs: list[Callable[[], None]] = []
            for name, data in found.items():
                descriptor = files.write_new(folder / name, data)
                ending.callback(files.close, descriptor)
                syncs.append(partial(files.sync, descriptor))
            names = [*found, *(file.name for file in attempt.layout.files)]
            syncs += [partial(files.sync_folder, path) for path in {(folder / name).parent for name in names}]
            files.sync_together(syncs)
        if lock is not None:
            lock.check()
    except OSError as error:
        raise _commit_failed(attempt, error) from error


def rename(attempt: Attempt) -> bool:
    """Rename a prepared attempt to the checkpoint that it becomes.

    Returns:
        Whether the checkpoint, which is there, is durable: nothing is to be deleted for one that may not be.

    Raises:
        CheckpointError: if the file system fails; no checkpoint is there then.
    """
    try:
        return attempt.folder.commit(attempt.iteration, attempt.name, replaces=attempt.replaces)
    except OSError as error:
        raise _commit_failed(attempt, error) from error


def _commit_failed(attempt: Attempt, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"Committing a checkpoint failed: {error.strerror} (errno {error.errno})",
        where=error.filename or attempt.folder.partial(attempt.iteration, attempt.name),
        expected=f"room for {attempt.layout.total_bytes} B",
        found=describe_free_space(attempt.folder.files, attempt.folder.root),
        fix="Committed checkpoints are untouched; make room or repair the disk.",
    )
