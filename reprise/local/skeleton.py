"""The skeleton of a local checkpoint: its JSON files, headers and sizes, which are the same on every host."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from reprise import json_file
from reprise.errors import CheckpointError
from reprise.format import host_file
from reprise.format.host_file import HostFile
from reprise.format.manifest import digest_of
from reprise.format.names import HOST, MANIFEST
from reprise.loading.reader import Checkpoint, open_tensor_file, read_header
from reprise.paths import read_regular
from reprise.storage.files import Files
from reprise.storage.folder import CheckpointFolder
from reprise.storage.patience import failed_read

_SIZES = "sizes"  # of the tensor files, in JSON


def skeleton_of(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the files of a folder without any piece: JSON files, headers, and the sizes of the tensor files.

    Raises:
        CheckpointError: naming a damaged file, or a file outside the opened manifest.
    """
    contents: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    for name, entry in checkpoint.manifest.files.items():
        path = host_file.path_of(checkpoint.path, name)
        if entry.is_tensor_file:
            sizes[name] = entry.total_bytes
            with open_tensor_file(checkpoint.files, path) as file:
                contents[name] = read_header(file, entry.total_bytes, where=path)
        else:
            contents[name] = _content(path)
        _require(contents[name], entry.digest, path)
    contents[MANIFEST] = _content(checkpoint.path / MANIFEST)
    _require(contents[MANIFEST], checkpoint.digest, checkpoint.path / MANIFEST)
    return {**contents, _SIZES: json.dumps(sizes).encode()}


def _require(content: bytes, digest: str, path: Path) -> None:
    if digest_of(content) != digest:
        raise CheckpointError("A file is damaged", where=path, expected=f"digest {digest}")


def _content(path: Path) -> bytes:
    try:
        return read_regular(path, limit_bytes=json_file.MAX_BYTES)
    except OSError as error:
        raise failed_read("A file cannot be read", error, where=path) from error


def write_skeleton(
    folder: Path, contents: Mapping[str, bytes], files: Files, *, is_whole: bool, with_room: bool = False
) -> None:
    """Write the files of a skeleton into an uncommitted folder.

    Args:
        is_whole: whether the folder will hold all pieces when it is committed.
        with_room: whether to reserve the blocks of all pieces; else the tensor files are holes after their headers.

    Raises:
        OSError: if the disk fails.
    """
    files.make_folder(folder)
    sizes = json.loads(contents[_SIZES])
    for name, data in contents.items():
        if name == _SIZES:
            continue
        if (folder / name).parent != folder:
            files.make_folder((folder / name).parent)
        files.write_whole(folder / host_file.stored_name(name, is_whole=is_whole), data)
        if name in sizes:
            descriptor = files.open_for_writing(folder / name)
            try:
                (files.reserve if with_room else files.extend)(descriptor, sizes[name])
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
