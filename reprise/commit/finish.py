"""Turns a fully written attempt into a checkpoint: JSON files, manifest, sync, rename. Leaders only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from reprise.commit.attempt import Attempt
from reprise.format import manifest
from reprise.format.layout import TensorKind, model_index
from reprise.format.manifest import FileEntry, Manifest, TensorEntry
from reprise.format.names import INDEX, MANIFEST
from reprise.storage import json_file
from reprise.storage.lock import FolderLock


def json_files(
    attempt: Attempt,
    tensors: Mapping[str, TensorEntry],
    *,
    documents: Mapping[str, json_file.Document],
    aliases: Mapping[str, str],
) -> dict[str, bytes]:
    """Return all JSON files by name, the manifest after the files it lists."""
    entries = {
        file.name: FileEntry(file.total_bytes, manifest.digest_of(file.header), is_tensor_file=True)
        for file in attempt.layout.files
    }
    files: dict[str, bytes] = {}
    has_adapters = any(place.spec.kind is TensorKind.ADAPTER for place in attempt.layout.places.values())
    index: dict[str, json_file.Document] = {} if has_adapters else {INDEX: model_index(attempt.layout)}
    for name, document in {**index, **documents}.items():
        files[name] = document if isinstance(document, bytes) else json_file.to_bytes(document)
        entries[name] = FileEntry(len(files[name]), manifest.digest_of(files[name]), is_tensor_file=False)
    files[MANIFEST] = manifest.to_bytes(Manifest(attempt.name, entries, tensors, aliases))
    return files


def prepare(
    attempt: Attempt,
    documents: Mapping[str, bytes],
    *,
    lock: FolderLock | None,
    beside: Sequence[Callable[[], None]] = (),
) -> None:
    """Write the JSON files into this host's folder, and sync them together with all its names.

    The syncs run in any order: nothing reads the folder before the rename, which comes after all of them.

    Args:
        beside: Further syncs to finish before the rename.

    Raises:
        CheckpointError: The lock is lost, or the file system fails.
    """
    files, folder = attempt.folder.files, attempt.partial
    with attempt.writing(), contextlib.ExitStack() as ending:
        files.make_folder(folder)
        syncs = list(beside)
        for name, data in documents.items():
            descriptor = files.write_new(folder / name, data)
            ending.callback(files.close, descriptor)
            syncs.append(partial(files.sync, descriptor))
        names = [*documents, *(file.name for file in attempt.layout.files)]
        syncs += [partial(files.sync_folder, path) for path in {(folder / name).parent for name in names}]
        files.sync_together(syncs)
        if lock is not None:
            lock.check()


def rename(attempt: Attempt) -> bool:
    """Rename a prepared attempt to its checkpoint.

    Returns:
        Whether the checkpoint, which is there, is durable. If not, nothing may be deleted in its favor.

    Raises:
        CheckpointError: The file system fails. There is no checkpoint then.
    """
    with attempt.writing():
        return attempt.folder.commit(attempt.iteration, attempt.name, replaces=attempt.replaces)
