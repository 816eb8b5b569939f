"""A local checkpoint's skeleton: its JSON files, headers and sizes, which are the same on every host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from reprise.format import manifest
from reprise.format.host_file import stored_name
from reprise.format.names import MANIFEST
from reprise.loading.reader import Checkpoint, open_tensor_file, read_file, read_header
from reprise.storage.files import Files


def skeleton_of(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return, by name, a checkpoint's JSON files and its tensor files' headers.

    Raises:
        CheckpointError: Names a damaged file.
    """
    contents = dict[str, bytes]()
    for name, entry in checkpoint.manifest.files.items():
        if entry.is_tensor_file:
            with open_tensor_file(checkpoint.files, checkpoint.path / name) as file:
                contents[name] = read_header(file, entry.total_bytes, where=checkpoint.path / name)
        else:
            contents[name] = read_file(checkpoint, name)
    contents[MANIFEST] = checkpoint.files.read_whole(checkpoint.path / MANIFEST)
    return contents


def write_skeleton(folder: Path, contents: Mapping[str, bytes], files: Files, *, is_whole: bool) -> None:
    """Write a skeleton's files into an uncommitted folder.

    Args:
        is_whole: Whether the folder will hold all pieces at the commit, so that their blocks are reserved. Else the
            tensor files have holes after their headers.

    Raises:
        OSError: The disk fails.
    """
    files.make_folder(folder)
    entries = manifest.from_bytes(contents[MANIFEST], where=folder / MANIFEST).files
    for name, data in contents.items():
        files.make_folder((folder / name).parent)
        files.write_whole(folder / stored_name(name, is_whole=is_whole), data)
        if name in entries and entries[name].is_tensor_file:
            descriptor = files.open_for_writing(folder / name)
            try:
                files.reserve(descriptor, entries[name].total_bytes, is_sparse=not is_whole)
            finally:
                files.close(descriptor)
