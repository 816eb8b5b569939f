"""The skeleton of a local checkpoint: its JSON files, headers and sizes, which are the same on every host."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trainer.atomic import replace_file
from trainer.checkpoint.format import host_file
from trainer.checkpoint.format.names import HOST, MANIFEST
from trainer.checkpoint.loading.reader import Checkpoint, open_tensor_file, read_header
from trainer.checkpoint.local.survey import Candidate
from trainer.checkpoint.storage.files import Files
from trainer.checkpoint.storage.folder import CheckpointFolder

_log = logging.getLogger(__name__)

_SIZES = "sizes"  # of the tensor files, in JSON


def skeleton_of(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the files that make a folder without any piece: JSON files, headers, and the sizes of the tensor files."""
    found: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    for name, entry in checkpoint.manifest.files.items():
        path = checkpoint.path / name
        if entry.is_tensor_file:
            with open_tensor_file(checkpoint.files, path) as file:
                found[name] = read_header(file, entry.total_bytes, where=path)
            sizes[name] = entry.total_bytes
        else:
            found[name] = host_file.path_of(checkpoint.path, name).read_bytes()
    return {**found, MANIFEST: (checkpoint.path / MANIFEST).read_bytes(), _SIZES: json.dumps(sizes).encode()}


def make_skeleton(folder: CheckpointFolder, candidate: Candidate, found: Mapping[str, bytes], *, attempt: str) -> None:
    """Make the folder of a checkpoint that holds no piece, and give it its name.

    Args:
        attempt: a name that is unique in the life of the folder.

    Raises:
        OSError: if the disk fails.
    """
    files, partial = folder.files, folder.partial(candidate.iteration, attempt)
    files.make_folder(partial)
    known = next(iter(candidate.found.values()))
    sizes = json.loads(found[_SIZES])
    for member, data in {**found, HOST: replace(known, host=None, held={}).to_bytes()}.items():
        if member == _SIZES:
            continue
        if (partial / member).parent != partial:
            files.make_folder((partial / member).parent)
        files.write_whole(partial / host_file.stored_name(member, is_whole=False), data)
        if member in sizes:
            descriptor = files.open_for_writing(partial / member)
            try:
                files.extend(descriptor, sizes[member])
            finally:
                files.close(descriptor)
    files.sync_folder(partial)
    folder.commit(candidate.iteration, attempt)


def mend_skeleton(path: Path, found: Mapping[str, bytes], files: Files) -> None:
    """Write JSON files, headers and sizes anew in a folder whose `host.json` is intact.

    Raises:
        OSError: if the disk fails.
    """
    sizes = json.loads(found[_SIZES])
    for member, data in found.items():
        if member in sizes:
            descriptor = files.open_for_writing(path / member)
            try:
                files.write(descriptor, [memoryview(data)], offset=0)
                files.extend(descriptor, sizes[member])
                files.sync(descriptor)
            finally:
                files.close(descriptor)
        elif member != _SIZES:
            replace_file(files, host_file.path_of(path, member), data)
    _log.warning("the JSON files and headers of %s are those of another host now", path)
