"""Holds of checkpoints in a store: objects `hold.PID.NONCE` in their folders, which expire as those of other hosts do.

A user's `hold` stays. A process writes its own anew every `HEARTBEAT_S`; without that the hold expires, by the clock of
the store. A process looks for the manifest after the hold is there, and a deletion for holds after the manifest is
gone: so either the process misses the checkpoint, or the deletion sees the hold.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from reprise.format.names import MANIFEST
from reprise.storage.holds import EXPIRY_S, HEARTBEAT_S, HOLD, OF_PROCESS, Hold, HoldingProcess
from reprise.stores.location import is_stored

if TYPE_CHECKING:
    from reprise.stores.client import StoreClient, StoredObject
    from reprise.stores.path import StorePath
    from reprise.stores.url import StoreUrl

ManifestVersion = tuple[object, ...]


class StoredHold:
    """A hold of this process on a checkpoint in a store.

    Args:
        path: the folder of the checkpoint.
        version: of its manifest.
    """

    def __init__(self, path: StorePath, version: ManifestVersion) -> None:
        self._path, self._version = path, version
        self._key = _new_key(path.url)
        self._text = json.dumps(asdict(HoldingProcess.of_this_process()))
        self._is_over = threading.Event()

    @staticmethod
    def take(path: StorePath) -> StoredHold | None:
        """Take a hold; None if there is no checkpoint.

        Raises:
            OSError: if the store fails.
        """
        version = manifest_version(path)
        if version is None:
            return None
        hold = StoredHold(path, version)
        with contextlib.ExitStack() as otherwise:
            otherwise.callback(hold.release)
            hold._write()
            if not hold.is_in_place():
                return None
            otherwise.pop_all()
        threading.Thread(target=hold._beat, name="hold-heartbeat", daemon=True).start()
        return hold

    def is_in_place(self) -> bool:
        """Return whether the checkpoint is still the one on which the hold was taken."""
        return manifest_version(self._path) == self._version

    def release(self) -> None:
        """Delete the hold; calling it again is fine."""
        self._is_over.set()
        with contextlib.suppress(OSError):  # it expires
            self._path.store.ask("delete", self._key)

    def _write(self) -> None:
        self._path.store.ask("put", self._key, self._text)

    def _beat(self) -> None:
        while not self._is_over.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):  # the store fails for a while
                self._write()


def take_hold(path: Path) -> Hold | StoredHold | None:
    """Take a hold on a checkpoint in a folder or a store; None if the checkpoint does not exist, or no longer.

    Raises:
        OSError: if the hold cannot be written.
    """
    return StoredHold.take(path) if is_stored(path) else Hold.take(path)  # type: ignore[arg-type]


def manifest_version(path: Path) -> ManifestVersion | None:
    """Return what tells a checkpoint from any other of its path, without reading it; None for no checkpoint.

    Raises:
        OSError: if a store fails.
    """
    if is_stored(path):
        return _stored_version(path)  # type: ignore[arg-type]
    try:
        status = os.stat(path / MANIFEST)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _stored_version(path: StorePath) -> ManifestVersion | None:
    try:
        return path.store.head(path.url.child(MANIFEST).key)
    except FileNotFoundError:
        return None


def is_held(client: StoreClient, folder: StoreUrl, objects: Mapping[str, StoredObject]) -> bool:
    """Return whether an unexpired hold is among the objects of a checkpoint's folder, by name.

    True also where the store refuses the object that would show its clock.
    """
    beats = [entry.modified_at for name, entry in objects.items() if OF_PROCESS.fullmatch(name)]
    try:
        return HOLD in objects or (bool(beats) and _store_time(client, folder) - max(beats) < EXPIRY_S)
    except OSError:
        return True


def _store_time(client: StoreClient, folder: StoreUrl) -> float:
    """Return the Unix time at which the store stamps an object now: hosts' clocks differ from it."""
    key = _new_key(folder)  # what a killed process leaves of it expires
    client.put(key, b"")
    try:
        return client.head(key).modified_at
    finally:
        client.delete([key])


def _new_key(folder: StoreUrl) -> str:
    return folder.child(f"{HOLD}.{os.getpid()}.{secrets.token_hex(4)}").key
