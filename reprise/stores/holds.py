"""Holds on checkpoints during long reads: in a folder a hold keeps it, in a store nothing does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reprise.format.names import MANIFEST
from reprise.storage.holds import Hold
from reprise.stores.locations import is_stored

ManifestVersion = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint in a store, used like a hold.

    Args:
        path: The checkpoint folder.
        version: Its manifest's version.
    """

    path: Path
    version: ManifestVersion | None

    def is_in_place(self) -> bool:
        """Return whether the checkpoint still has this version."""
        return self.version is not None and manifest_version(self.path) == self.version

    def release(self) -> None:
        """Do nothing: a store has no holds."""


def take_hold(path: Path) -> Hold | StoredCheckpoint | None:
    """Take a hold on a checkpoint in a folder. Return None if the checkpoint does not exist, or no longer.

    Raises:
        OSError: The hold cannot be written.
    """
    return StoredCheckpoint(path, manifest_version(path)) if is_stored(path) else Hold.take(path)


def manifest_version(path: Path) -> ManifestVersion | None:
    """Return a value that identifies the checkpoint at a path without reading it, or None without a checkpoint.

    Raises:
        OSError: A store fails.
    """
    try:
        status = (path / MANIFEST).stat()
    except OSError as error:
        if is_stored(path) and not isinstance(error, FileNotFoundError):
            raise
        return None
    return status.st_ino, status.st_size, status.st_mtime, status.st_mtime_ns  # a store may have no ETag
