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


class Upload:
    """Uploads one checkpoint.

    Args:
        folder: The checkpoint's folder in the store.
        source: The checkpoint's folder, perhaps in a store too.

    Raises:
        FileNotFoundError: The checkpoint is gone.
    """

    def __init__(self, client: StoreClient, folder: Path, source: Path) -> None:
        self._client, self._folder, self._source = client, folder, source
        self.files = CheckpointFiles.at(source)
        self._mark = f"{MARK}{self.files.digest}"

    def run(self, sent: Callable[[str], None] = lambda _: None) -> None:
        """Upload the missing files, then the manifest. After an error, the next call continues.

        Args:
            sent: Called with the name of each uploaded file.

        Raises:
            FileNotFoundError: The checkpoint is no longer there, or the folder has lost its mark.
            CheckpointError: A file is missing or has the wrong size, or the folder has another checkpoint, or objects
                not left by an upload.
            OSError: The store or the source fails, or an uploaded file has disappeared.
        """
        objects = self._client.objects(self._folder)
        marks = {name for name in objects if name.startswith(MARK)}
        if MANIFEST in objects:
            if self._client.read_text(self._folder / MANIFEST) != self.files.manifest.decode():
                raise self._refusal("another checkpoint")
        else:
            if objects and not marks:
                raise self._refusal(f"{min(objects)}, which is not part of an upload")
            if marks != {self._mark}:
                clear(self._client, self._folder, objects)
                self._client.create(self._folder / self._mark, "")
                objects = {}
            for name in self._absent(objects):
                self._send(name)
                sent(name)
            self._commit()
        self._client.delete(self._folder, {*marks, self._mark})

    def _absent(self, objects: Mapping[str, tuple[int, float]]) -> list[str]:
        return [name for name, size in self.files.sizes.items() if objects.get(name, (-1, 0.0))[0] != size]

    def _send(self, name: str) -> None:
        path, size, actual = self._source / name, self.files.sizes[name], None
        with contextlib.suppress(FileNotFoundError):
            actual = files_of(path).size(path)
        if actual != size:
            self._require_same()
            raise CheckpointError("A file has the wrong size", where=path, expected=size, found=actual)
        self._client.put(self._folder / name, path)

    def _require_same(self) -> None:
        """Raise FileNotFoundError unless the checkpoint is unchanged, and the folder has its mark."""
        with contextlib.suppress(FileNotFoundError):
            if files_of(self._source).read_whole(self._source / MANIFEST) == self.files.manifest:
                self._client.head(self._folder / self._mark)
                return
        what = "the checkpoint was replaced or deleted during its upload"
        raise FileNotFoundError(errno.ENOENT, what, str(self._source))

    def _commit(self) -> None:
        self._require_same()
        for name in self._absent(self._client.objects(self._folder)):
            raise OSError(errno.EIO, "a file disappeared during the upload", str(self._folder / name))
        if not self._client.create(self._folder / MANIFEST, self.files.manifest.decode()):
            raise self._refusal("another checkpoint")

    def _refusal(self, found: str) -> CheckpointError:
        return CheckpointError(
            "A folder in the store does not belong to this upload",
            where=self._folder,
            expected="this checkpoint, or an empty folder",
            found=found,
            fix="Delete it, or choose another target.",
        )


def clear(client: StoreClient, folder: Path, names: Iterable[str]) -> None:
    """Delete a folder's objects, its manifest first and the marks last."""
    client.delete(folder, sorted(names, key=lambda name: (name != MANIFEST, name.startswith(MARK))))


def remove(client: StoreClient, folder: Path) -> None:
    """Delete a checkpoint, its manifest first, so that no reader sees a partial one."""
    if objects := client.objects(folder):
        client.create(folder / _REMOVAL, "")
        clear(client, folder, [*objects, _REMOVAL])
