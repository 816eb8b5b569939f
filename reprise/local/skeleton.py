"""The skeleton of a local checkpoint: its JSON files, headers and sizes, which are the same on every host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from reprise.format import manifest
from reprise.format.host_file import HostFile, stored_name
from reprise.format.names import HOST, MANIFEST
from reprise.loading.reader import Checkpoint, open_tensor_file, read_content, read_file, read_header
from reprise.storage.files import Files
from reprise.storage.folder import CheckpointFolder


def skeleton_of(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return by name the JSON files of a checkpoint, and the headers of its tensor files.

    Raises:
        CheckpointError: naming a damaged file.
    """

    def content(name: str, entry: manifest.FileEntry) -> bytes:
        if not entry.is_tensor_file:
            return read_file(checkpoint, name)
        with open_tensor_file(checkpoint.files, checkpoint.path / name) as file:
            return read_header(file, entry.total_bytes, where=checkpoint.path / name)

    contents = {name: content(name, entry) for name, entry in checkpoint.manifest.files.items()}
    return contents | {MANIFEST: read_content(checkpoint.path / MANIFEST, checkpoint.files)}


def write_skeleton(folder: Path, contents: Mapping[str, bytes], files: Files, *, is_whole: bool) -> None:
    """Write the files of a skeleton into an uncommitted folder.

    Args:
        is_whole: whether the folder will hold all pieces when it is committed: their blocks are reserved. Else the
            tensor files are holes after their headers.

    Raises:
        OSError: if the disk fails.
    """
    files.make_folder(folder)
    entries = manifest.from_bytes(contents[MANIFEST], where=folder / MANIFEST).files
    for name, data in contents.items():
        files.make_folder((folder / name).parent)
        files.write_whole(folder / stored_name(name, is_whole=is_whole), data)
        if name in entries and entries[name].is_tensor_file:
            descriptor = files.open_for_writing(folder / name)
            try:
                (files.reserve if is_whole else files.extend)(descriptor, entries[name].total_bytes)
            finally:
                files.close(descriptor)


def make_skeleton(
    folder: CheckpointFolder, iteration: int, part: HostFile, contents: Mapping[str, bytes], *, attempt: str
) -> None:
    """Make the folder of a checkpoint, without any piece, and give it its name.

    Args:
        part: the `host.json` of any host with the checkpoint.
        attempt: a unique name in the life of the folder.

    Raises:
        OSError: if the disk fails.
    """
    files, partial = folder.files, folder.partial(iteration, attempt)
    host = replace(part, host=None, held={}).to_bytes()
    write_skeleton(partial, {**contents, HOST: host}, files, is_whole=False)
    files.sync_folder(partial)
    folder.commit(iteration, attempt)
