"""Turns an attempt whose parts are all written into a checkpoint: JSON files, manifest, sync, rename. Rank 0 only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer.checkpoint.commit.protocol import Attempt
from trainer.checkpoint.format import json_file, manifest
from trainer.checkpoint.format.layout import model_index
from trainer.checkpoint.format.manifest import FileEntry, Manifest, WrittenPiece
from trainer.checkpoint.format.names import INDEX, MANIFEST
from trainer.checkpoint.storage.files import describe_free_space
from trainer.checkpoint.storage.lock import FolderLock
from trainer.errors import CheckpointError


def prepare(
    attempt: Attempt,
    written: Sequence[WrittenPiece],
    *,
    documents: Mapping[str, json_file.Document],
    aliases: Mapping[str, str],
    lock: FolderLock | None,
) -> None:
    """Check that the pieces tile every tensor, write the JSON files and the manifest, and sync.

    Raises:
        CheckpointError: if the pieces do not tile, the lock is lost, or the file system fails.
    """
    files, folder = attempt.folder.files, attempt.folder.partial(attempt.iteration, attempt.name)
    tensors = manifest.tile(attempt.layout, written)
    entries = {
        file.name: FileEntry(file.total_bytes, manifest.digest_of(file.header), is_tensor_file=True)
        for file in attempt.layout.files
    }
    try:
        for name, document in {INDEX: model_index(attempt.layout), **documents}.items():
            data = json_file.content(document)
            files.write_whole(folder / name, data)
            entries[name] = FileEntry(len(data), manifest.digest_of(data), is_tensor_file=False)
        data = manifest.to_bytes(Manifest(attempt.name, entries, tensors, aliases))
        files.write_whole(folder / MANIFEST, data)
        for path in sorted({(folder / name).parent for name in entries}, reverse=True):
            files.sync_folder(path)
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
        return attempt.folder.commit(attempt.iteration, attempt.name)
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
