"""Uploads one checkpoint into a store, alone or together with other hosts. Its manifest goes last and is the commit.

A small object, the mark, names the checkpoint whose files lie in a folder of the store without a manifest. The mark is
written once the folder is empty, and deleted after the commit. So a file of the right size below a mark is a file of
the checkpoint: an interrupted upload goes on from there, on any host, and the listing tells what is missing.

Of two live runs at one URL, none deletes or replaces what the other has committed. An upload writes a claim before it
looks for the manifest and empties the folder, and looks again once the folder has its mark; a commit writes the
manifest before it looks for claims and marks of others. So the one sees the manifest, or the other the claim, in any
store whose listings show what is written. Only the file that an overtaken upload is writing may still arrive: its
digests tell.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from reprise.errors import CheckpointError
from reprise.format.names import MANIFEST
from reprise.paths import open_regular, read_regular
from reprise.stores.checkpoint_files import CheckpointFiles, shares
from reprise.stores.client import StoreClient, StoredObject
from reprise.stores.holds import is_held
from reprise.stores.leftovers import abort_uploads
from reprise.stores.url import StoreUrl

SUPERSEDED = "manifest.superseded.json"  # the manifest of an iteration that its run has given up
_MARK = ".upload-"


_TRIES, _FIRST_PAUSE_S = 6, 0.25
T = TypeVar("T")


class SourceChangedError(Exception):
    """The checkpoint was replaced or deleted during its upload."""


class OvertakenError(CheckpointError):
    """Another upload has begun in the same folder of a store, or has ended there."""

    def __init__(self, folder: StoreUrl) -> None:
        super().__init__(
            "Another upload has begun in the same place of a store",
            where=folder,
            expected="one upload at a time",
            fix="End one of the two runs, or give it a URL of its own.",
        )


class CheckpointSource(Protocol):
    """A checkpoint to upload."""

    def send(self, name: str, client: StoreClient, key: str) -> None:
        """Write a file of the checkpoint into a store."""

    def check(self, files: CheckpointFiles) -> None:
        """Raise SourceChangedError unless the checkpoint is still the same."""


class LocalSource(CheckpointSource):
    """A checkpoint in a folder.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        status = os.stat(path / MANIFEST)
        self._version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        self.files = CheckpointFiles.parse(read_regular(path / MANIFEST), where=path / MANIFEST)

    def send(self, name: str, client: StoreClient, key: str) -> None:
        with self.file(name) as path:
            descriptor = open_regular(path, follows_links=False)
            try:
                size = os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
            if size != self.files.sizes[name]:
                raise CheckpointError(
                    "A file has the wrong size", where=path, expected=f"{self.files.sizes[name]} B", found=f"{size} B"
                )
            client.put_file(key, path)

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """Yield the path of a file of the checkpoint, as it goes into the store."""
        yield self.path / name

    def check(self, files: CheckpointFiles) -> None:
        try:
            status = os.stat(self.path / MANIFEST)
        except FileNotFoundError as error:
            raise SourceChangedError from error
        if (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns) != self._version:
            raise SourceChangedError


class Upload:
    """The upload of one checkpoint.

    Args:
        folder: of the checkpoint in the store.
        host: the number of this host among `hosts`, which upload the checkpoint together. Host 0 begins and commits.
        progress: called with the number of bytes uploaded since the last call.
    """

    def __init__(
        self,
        client: StoreClient,
        folder: StoreUrl,
        source: CheckpointSource,
        files: CheckpointFiles,
        *,
        host: int = 0,
        hosts: int = 1,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._client, self._folder, self._source, self.files = client, folder, source, files
        self._share = shares(files.sizes, hosts)[host]
        self._has_peers = hosts > 1
        self._mark = folder.child(f"{_MARK}{files.digest}").key
        self._claim = f"{self._mark}.claim"
        self._progress = progress
        self._has_aborted = False
        self._is_fresh, self._sent = False, set[str]()  # whether this process has emptied the folder, and what it sent

    def begin(self, *, replaces: bool = False) -> bool:
        """Make the folder ready for the files of this checkpoint; return False if it is committed there already.

        The folder loses its manifest first: from then on readers see no checkpoint, until the commit.

        Args:
            replaces: whether another checkpoint there is this run's own, and goes.

        Raises:
            OvertakenError: if another checkpoint is there.
        """
        objects = self.objects()
        if MANIFEST in objects and self._is_committed(objects[MANIFEST]):
            remove_marks(self._client, self._folder)
            return False
        if MANIFEST not in objects and self._mark in {entry.key for entry in objects.values()}:
            self._client.delete([self._claim])  # of a process that died between the two
            return True
        if MANIFEST not in objects or replaces:
            self._client.put(self._claim, b"")
            objects = {name: entry for name, entry in self.objects().items() if entry.key != self._claim}
        if MANIFEST in objects and not replaces:
            self._client.delete([self._claim])
            raise OvertakenError(self._folder)
        clear(self._client, objects)
        self._client.put(self._mark, b"")
        keys = {entry.key for name, entry in self.objects().items() if name.startswith((_MARK, MANIFEST))}
        if keys != {self._claim, self._mark}:
            self._client.delete([self._mark, self._claim])
            raise OvertakenError(self._folder)
        self._client.delete([self._claim])
        self._is_fresh = True
        return True

    def has_another(self) -> bool:
        """Return whether the folder of the store has another checkpoint."""
        objects = self.objects()
        return MANIFEST in objects and not self._is_committed(objects[MANIFEST])

    def require_own(self) -> None:
        """Refuse a folder of the store with objects and no mark: no upload has left them.

        Raises:
            CheckpointError: naming an object.
        """
        objects = self.objects()
        if objects and not any(name.startswith(_MARK) for name in objects):
            raise CheckpointError(
                "A folder of the store holds objects, and no upload has left them",
                where=self._folder,
                expected=f"{MANIFEST}, or no object",
                found=min(objects),
                fix="Delete them, or name another target.",
            )

    def has_begun(self) -> bool:
        """Return whether host 0 has made the folder ready."""
        return _exists(self._client, self._mark) and not _exists(self._client, self._folder.child(MANIFEST).key)

    def send(self, names: Collection[str] | None = None) -> None:
        """Upload files absent from the store, the largest first.

        Args:
            names: of the files; None for the share of this host.

        Raises:
            SourceChangedError: if the checkpoint is no longer there, or another host has begun another upload.
        """
        if names is None:
            names = self._share
            if not self._has_aborted:  # before this process has begun any
                abort_uploads(self._folder, names)
                self._has_aborted = True
        for name in self._unsent(names):
            if not _exists(self._client, self._mark):
                raise SourceChangedError if self._has_peers else OvertakenError(self._folder)
            self._source.check(self.files)
            try:
                self._source.send(name, self._client, self._folder.child(name).key)
            finally:
                self._source.check(self.files)
            self._sent.add(name)
            self._progress(self.files.sizes[name])

    def _unsent(self, names: Iterable[str]) -> list[str]:
        """Return the files to send: a file that this process has not sent into an empty folder is another's."""
        if not self._is_fresh or self._has_peers:
            return self.missing(names)
        sizes = self.files.sizes
        return sorted(set(names) - self._sent, key=lambda name: (-sizes[name], name))

    def missing(self, names: Iterable[str] | None = None) -> list[str]:
        """Return the files, of all or of some, absent from the store, the largest first."""
        objects, sizes = self.objects(), self.files.sizes
        chosen = sizes if names is None else names
        lacking = [name for name in chosen if name not in objects or objects[name].size != sizes[name]]
        return sorted(lacking, key=lambda name: (-sizes[name], name))

    def commit(self) -> None:
        """Write the manifest, once the store has all files: from here on the checkpoint exists.

        Raises:
            OSError: if a file is missing.
            OvertakenError: if another upload has begun here; files of equal sizes may be those of its checkpoint.
            SourceChangedError: if the checkpoint is no longer there.
        """
        self._require_mark()
        missing = self.missing()
        if missing:
            raise OSError(errno.EIO, "a file is missing that was there", str(self._folder.child(missing[0])))
        self._source.check(self.files)
        manifest = self._folder.child(MANIFEST).key
        if not self._client.create(manifest, self.files.manifest):
            raise OvertakenError(self._folder)
        try:
            self._require_mark()
        except OvertakenError:  # the other has seen no manifest, and deletes the files
            self._client.delete([manifest])
            raise
        self._client.delete([self._mark])

    def _require_mark(self) -> None:
        """Refuse to commit where another upload has begun.

        Raises:
            OvertakenError: if the mark of this upload is not the only one.
        """
        marks = [entry.key for name, entry in self.objects().items() if name.startswith(_MARK)]
        if marks != [self._mark]:
            raise OvertakenError(self._folder)

    def objects(self) -> dict[str, StoredObject]:
        """Return the objects of the folder by their names in it."""
        return list_folder(self._client, self._folder)

    def _is_committed(self, manifest: StoredObject) -> bool:
        if manifest.size != len(self.files.manifest):
            return False
        return bytes(self._client.read(manifest.key, 0, manifest.size)) == self.files.manifest


def list_folder(client: StoreClient, folder: StoreUrl) -> dict[str, StoredObject]:
    """Return the objects below a folder by their names in it."""
    start = len(folder.key) + 1
    return {entry.key[start:]: entry for entry in client.objects(folder.key)}


def clear(client: StoreClient, objects: dict[str, StoredObject]) -> None:
    """Delete the objects of a folder, its manifest first and the marks last."""
    order = sorted(objects, key=lambda name: (name != MANIFEST, name.startswith(_MARK)))
    client.delete([objects[name].key for name in order])


def retire(client: StoreClient, folder: StoreUrl) -> bool:
    """Delete the manifest of a checkpoint, and so the checkpoint, unless a hold protects it; return whether it is gone.

    A hold that comes meanwhile is seen afterward: the manifest is then written again.
    """
    key, objects = folder.child(MANIFEST).key, list_folder(client, folder)
    if is_held(client, folder, objects):
        return False
    manifest = bytes(client.read(key, 0, objects[MANIFEST].size)) if MANIFEST in objects else b""
    client.delete([key])
    if manifest and is_held(client, folder, list_folder(client, folder)):
        client.put(key, manifest)
        return False
    return True


def remove_marks(client: StoreClient, folder: StoreUrl) -> None:
    """Delete the marks of a folder whose checkpoint is committed."""
    client.delete([entry.key for name, entry in list_folder(client, folder).items() if name.startswith(_MARK)])


def supersede(client: StoreClient, folder: StoreUrl) -> None:
    """Take back the commit of an iteration given up by its run. Its files stay."""
    key = folder.child(MANIFEST).key
    try:
        data = bytes(client.read(key, 0, client.head(key).size))
    except FileNotFoundError:
        return
    client.put(folder.child(SUPERSEDED).key, data)
    client.delete([key])


def _exists(client: StoreClient, key: str) -> bool:
    try:
        client.head(key)
    except FileNotFoundError:
        return False
    return True


def retried(call: Callable[[], T]) -> T:
    """Return the result of a repeatable call; a store may fail for seconds beyond obstore's own retries.

    Raises:
        OSError: from the last try, or at once for refused credentials and absent objects.
    """
    for number in range(_TRIES - 1):
        try:
            return call()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            time.sleep(_FIRST_PAUSE_S * 2**number * random.uniform(0.5, 1.5))
    return call()
