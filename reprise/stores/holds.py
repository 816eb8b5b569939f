"""A checkpoint that is read for long: in a folder a hold keeps it, in a store nothing does."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from reprise.format.names import MANIFEST
from reprise.storage.holds import Hold
from reprise.stores.locations import is_stored

ManifestVersion = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint in a store, in the place of a hold.

    Args:
        path: the folder of the checkpoint.
        version: of its manifest.
    """

    path: Path
    version: ManifestVersion | None

    def is_in_place(self) -> bool:
        """Return whether the checkpoint is still the one of this version."""
        return self.version is not None and manifest_version(self.path) == self.version

    def release(self) -> None:
        """Do nothing: there is no hold."""


def take_hold(path: Path) -> Hold | StoredCheckpoint | None:
    """Take a hold on a checkpoint in a folder; None if the checkpoint does not exist, or no longer.

    Raises:
        OSError: if the hold cannot be written.
    """
    return StoredCheckpoint(path, manifest_version(path)) if is_stored(path) else Hold.take(path)


def manifest_version(path: Path) -> ManifestVersion | None:
    """Return what tells a checkpoint from any other of its path, without reading it; None for no checkpoint.

    Raises:
        OSError: if a store fails.
    """
    try:
        if is_stored(path):
            from reprise.stores.path import url_of
            from reprise.stores.store import ask

            return tuple(ask(url_of(path / MANIFEST), "head"))
        status = os.stat(path / MANIFEST)
    except OSError as error:
        if is_stored(path) and not isinstance(error, FileNotFoundError):
            raise
        return None
    return status.st_ino, status.st_mtime_ns
