"""Uploads one checkpoint to a store folder: its data first, its manifest last, which is the commit.

A small object, the mark, names the checkpoint whose files lie in a folder without a manifest: below it, any file with
the right size belongs to that checkpoint. So an interrupted upload resumes, and an interrupted deletion's remains are
recognized.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from reprise.errors import CheckpointError
from reprise.format.names import MANIFEST
from reprise.stores.checkpoint_files import CheckpointFiles
from reprise.stores.locations import files_of

if TYPE_CHECKING:
    from reprise.stores.client import StoreClient

MARK = ".upload-"
_REMOVAL = f"{MARK}removed"


def upload(
    client: StoreClient,
    folder: Path,
    source: Path,
    content: CheckpointFiles,
    sent: Callable[[str], None] = lambda _: None,
) -> None:
    """Upload a checkpoint's missing files, then its manifest. After an error, the next call continues.

    Args:
        folder: The checkpoint's folder in the store.
        source: The checkpoint's folder, perhaps in a store too.
        sent: Called with the name of each uploaded file.

    Raises:
        FileNotFoundError: The checkpoint is no longer there, or the folder has lost its mark.
        CheckpointError: The folder has another checkpoint, or objects not left by an upload.
        OSError: The store or the source fails, or an uploaded file has disappeared.
    """
    mark, manifest = f"{MARK}{content.digest}", content.manifest.decode()
    objects = client.objects(folder)
    marks = {name for name in objects if name.startswith(MARK)}
    if MANIFEST in objects:
        obstacle = "" if client.read_text(folder / MANIFEST) == manifest else "another checkpoint"
    elif objects and not marks:
        obstacle = f"{min(objects)}, which is not part of an upload"
    else:
        if marks != {mark}:
            clear(client, folder, objects)
            client.create(folder / mark, "")
            objects = {}
        for name in _absent(content, objects):
            client.put(folder / name, source / name)
            sent(name)
        objects, is_same = client.objects(folder), False
        with contextlib.suppress(FileNotFoundError):
            is_same = mark in objects and files_of(source).read_whole(source / MANIFEST) == content.manifest
        if not is_same:
            what = "the checkpoint was replaced or deleted during its upload"
            raise FileNotFoundError(errno.ENOENT, what, str(source))
        for name in _absent(content, objects):
            raise OSError(errno.EIO, "a file disappeared during the upload", str(folder / name))
        obstacle = "" if client.create(folder / MANIFEST, manifest) else "another checkpoint"
    if obstacle:
        raise CheckpointError(
            "A folder in the store does not belong to this upload",
            where=folder,
            expected="this checkpoint, or an empty folder",
            found=obstacle,
            fix="Delete it, or choose another target.",
        )
    client.delete(folder, {*marks, mark})


def _absent(content: CheckpointFiles, objects: Mapping[str, tuple[int, float]]) -> list[str]:
    return [name for name, size in content.sizes.items() if objects.get(name, (-1, 0.0))[0] != size]


def clear(client: StoreClient, folder: Path, names: Iterable[str]) -> None:
    """Delete a folder's objects, its manifest first and the marks last."""
    client.delete(folder, sorted(names, key=lambda name: (name != MANIFEST, name.startswith(MARK))))


def remove(client: StoreClient, folder: Path) -> None:
    """Delete a checkpoint, its manifest first, so that no reader sees a partial one."""
    if objects := client.objects(folder):
        client.create(folder / _REMOVAL, "")
        clear(client, folder, [*objects, _REMOVAL])
