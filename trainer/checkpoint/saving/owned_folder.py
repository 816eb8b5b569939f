"""The checkpoint folder while a run owns it: rank 0 holds its lock, and every rank sees the same folder."""

from __future__ import annotations

import contextlib
import logging

from trainer.checkpoint.commit.channel import StoreChannel
from trainer.checkpoint.policy import Retention
from trainer.checkpoint.saving.room import decide_expired, delete
from trainer.checkpoint.saving.saved_iterations import SavedIterations
from trainer.checkpoint.storage.files import cannot_write
from trainer.checkpoint.storage.folder import CheckpointFolder
from trainer.checkpoint.storage.lock import FolderLock
from trainer.checkpoint.storage.shared_folder import require_mark
from trainer.errors import TrainerError

_log = logging.getLogger(__name__)


class OwnedFolder:
    """The folder that a run writes to, on one rank. All ranks make the same calls in the same order.

    Args:
        nonce: a name of this run of the program, equal on all ranks.
    """

    def __init__(self, folder: CheckpointFolder, channel: StoreChannel, nonce: str) -> None:
        self.folder = folder
        self.lock: FolderLock | None = None
        self._channel, self._nonce = channel, nonce
        self._agreements = 0

    def acquire(self) -> TrainerError | None:
        """Take the lock, sweep what dead attempts left, and mark the folder. Rank 0 only; return the problem, if any.

        Nothing is raised: the other ranks would wait for this one.
        """
        if self._channel.rank:
            return None
        files = self.folder.files
        try:
            lock = FolderLock(self.folder.root, self._nonce)
            lock.acquire()
            self.lock = lock
            for path in self.folder.sweep():
                _log.info("swept %s, left by an interrupted save or deletion", path.name)
            if self._channel.world_size > 1:
                files.mark(self.folder.mark(self._nonce))
        except TrainerError as error:
            return error
        except OSError as error:
            return cannot_write(self.folder.root, error)
        return None

    def require_shared(self) -> None:
        """Let every rank find the mark that rank 0 has left in the folder, then remove it.

        Raises:
            CheckpointError: on every rank, if one of them does not see it.
        """
        if self._channel.world_size == 1:
            return
        problem: TrainerError | None = None
        mark = self.folder.mark(self._nonce)
        try:
            if self._channel.rank:
                require_mark(mark, self.folder.files)
        except TrainerError as error:
            problem = error
        try:
            self.agree(problem)
        finally:
            if self._channel.rank == 0:
                with contextlib.suppress(OSError):  # the next start sweeps it
                    self.folder.files.remove_file(mark)

    def rewind(self, iteration: int, retention: Retention, saved: SavedIterations) -> None:
        """Rename checkpoints newer than `iteration`, then delete those that retention gives up."""
        problem: TrainerError | None = None
        if self._channel.rank == 0:
            try:
                names = [*self.folder.committed(), *self.folder.non_folders()]
                newer = [found for found in names if found > iteration]
                for path in self.folder.supersede(newer):
                    _log.info("an abandoned branch of this run is kept as %s", path.name)
                self._retain(retention, saved)
            except OSError as error:
                problem = cannot_write(self.folder.root, error)
        self.agree(problem)

    def release(self) -> None:
        """Let go of the lock."""
        if self.lock is not None:
            self.lock.release()

    def agree(self, problem: TrainerError | None) -> None:
        """Let every rank go on only if none has a problem; see `StoreChannel.agree`."""
        self._agreements += 1
        self._channel.agree(f"folder/{self._nonce}/{self._agreements}", problem)

    def _retain(self, retention: Retention, saved: SavedIterations) -> None:
        """Delete what retention gives up, if the newest was loaded and all of it checked: it is known to be good."""
        expired, committed = decide_expired(self.folder, retention, pinned=saved.pinned)
        if not expired or committed[-1] not in saved.pinned or not saved.is_loaded_verified:
            return
        keep = retention.max_checkpoint_keep
        for gone in delete(self.folder, expired, attempt=self._nonce, lock=self.lock):
            _log.info("deleted iteration %d, which checkpoint.max_checkpoint_keep=%d does not keep", gone, keep)
