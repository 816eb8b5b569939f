"""The parts of local checkpoints on this host, and the hold on the one that the hosts upload now."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from reprise.errors import TrainerError, UnreadableError
from reprise.format.host_file import HostFile, PieceNumbers
from reprise.format.names import HOST, MANIFEST
from reprise.loading.reader import Checkpoint, open_checkpoint, read_places
from reprise.local.survey import PartSummary
from reprise.storage.folder import CheckpointFolder
from reprise.storage.holds import Hold

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostPart:
    """The part of a checkpoint on this host.

    Args:
        by_writer: the pieces of every host at the save, by its number.
    """

    checkpoint: Checkpoint
    host: HostFile
    summary: PartSummary
    by_writer: Mapping[int, PieceNumbers]


class HostParts:
    """The parts in the folder of this host. Any thread may call it.

    Attributes:
        chosen: iteration and digest of the checkpoint that host 0 has chosen last, which is held here.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self.folder = folder
        self.chosen: tuple[int, str] | None = None
        self._hold: Hold | None = None
        self._found: tuple[object, HostPart | None] | None = None  # the last one, by its version
        self._lock = threading.RLock()

    def find(self, iteration: int, digest: str) -> HostPart | None:
        """Return the part of a checkpoint on this host, as its `host.json` is now; None if there is none.

        Args:
            digest: of the manifest.
        """
        path = self.folder.iteration(iteration)
        with self._lock:
            try:
                statuses = [(path / name).stat() for name in (MANIFEST, HOST)]
                version = path, [(status.st_ino, status.st_mtime_ns) for status in statuses]
                if self._found is None or self._found[0] != version:
                    self._found = version, self._read(path)
            except (OSError, UnreadableError) as error:
                _log.debug("%s cannot be read: %s", path, error)
                return None
            part = self._found[1]
            return part if part is not None and part.checkpoint.digest == digest else None

    def _read(self, path: Path) -> HostPart | None:
        """Return the part in a folder; None if it is damaged."""
        try:
            checkpoint = open_checkpoint(path, self.folder.files)
            read_places(checkpoint)
        except UnreadableError:
            raise
        except TrainerError as error:
            _log.error("%s is not uploaded from this host: %s", path, error)
            return None
        host = checkpoint.host
        return None if host is None else HostPart(checkpoint, host, PartSummary.of(host), host.by_writer())

    def hold(self, iteration: int, digest: str) -> HostPart | None:
        """Keep a checkpoint, in place of the one before, and return the part of it here; None if there is none.

        Raises:
            OSError: naming the folder, if it cannot be written.
        """
        with self._lock:
            if self.chosen != (iteration, digest) or self._hold is None or not self._hold.is_in_place():
                self.release()
                path = self.folder.iteration(iteration)
                try:
                    self._hold = Hold.take(path)
                except OSError as error:
                    raise OSError(error.errno, error.strerror, str(path)) from error
            part = None if self._hold is None else self.find(iteration, digest)
            if part is None:
                self.release()
            else:
                self.chosen = iteration, digest
            return part

    def release(self) -> None:
        """Keep no checkpoint."""
        with self._lock:
            self.chosen = None
            if self._hold is not None:
                self._hold.release()
                self._hold = None
