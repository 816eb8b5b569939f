"""The checkpoint folder while a run owns it: its leader holds its lock, and every rank of the host sees the same one.

A shared folder is that of one host with all ranks, led by rank 0.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager

from reprise.atomic import temporary_of
from reprise.commit.channel import StoreChannel
from reprise.commit.hosts import Hosts
from reprise.format.host_file import attempt_of
from reprise.format.names import HOST
from reprise.policy import Retention
from reprise.saving.room import decide_expired, delete
from reprise.saving.saved_iterations import SavedIterations
from reprise.storage.folder import CheckpointFolder, named_iteration
from reprise.storage.lock import FolderLock
from reprise.storage.shared_folder import require_mark

_log = logging.getLogger(__name__)


class OwnedFolder:
    """The folder that a run writes to, on one rank. All ranks make the same calls in the same order.

    Args:
        nonce: a name of this run of the program, equal on all ranks.
        hosts: the hosts that have a folder of their own each; None for a folder that all ranks share.
    """

    def __init__(self, folder: CheckpointFolder, channel: StoreChannel, nonce: str, hosts: Hosts | None = None) -> None:
        self.folder = folder
        self.hosts = hosts or Hosts.of(channel.ranks)
        self.lock: FolderLock | None = None
        self._channel, self._nonce = channel, nonce
        self._is_local = hosts is not None
        self._leads = channel.rank in self.hosts.leaders
        self._is_marked = len(self.hosts.ranks_with(channel.rank)) > 1
        self._key = "local" if self._is_local else "folder"
        self._agreements = 0

    def acquire(self) -> None:
        """Take the lock, settle what dead attempts left, and leave the mark that `require_shared` looks for.

        Raises:
            LockError: on every rank, if another job writes to the folder.
            CheckpointError: on every rank, if the folder cannot be written.
        """
        if not self._is_local:
            with self._agreed():
                if self._leads:
                    self.take(marks=True)
            return
        with self._agreed(), self._writing():
            if self._leads:
                self._take_lock()
        elsewhere = self._committed_elsewhere()
        with self._agreed(), self._writing():
            if self._leads:
                self._settle(elsewhere, marks=True)

    def take(self, *, marks: bool) -> None:
        """Take the lock and settle what dead attempts left, on the leader of a shared folder alone.

        Args:
            marks: leave the mark that `require_shared` looks for.

        Raises:
            LockError: if another job writes to the folder.
            CheckpointError: if the folder cannot be written.
        """
        with self._writing():
            self._take_lock()
            self._settle(frozenset(), marks=marks)

    def _take_lock(self) -> None:
        lock = FolderLock(
            self.folder.root,
            self._nonce,
            another=self.folder.terms.another,
            is_local=self._is_local,
            files=self.folder.files,
        )
        lock.acquire()
        self.lock = lock

    def _settle(self, elsewhere: Collection[str], *, marks: bool) -> None:
        """Complete the attempts that another host has committed, sweep all others, and mark the folder."""
        for iteration, attempt in self.folder.partials():
            if attempt in elsewhere and attempt_of(self.folder.partial(iteration, attempt)) == attempt:
                self.folder.commit(iteration, attempt)
                _log.warning("iteration %d, which another host had committed, is complete on this one", iteration)
        if self._is_local:  # a copy that was interrupted leaves the next host.json of a committed folder
            for iteration in self.folder.committed():
                self.folder.files.remove_file(temporary_of(self.folder.iteration(iteration) / HOST))
        for path in self.folder.sweep():
            _log.info("swept %s, left by an interrupted save or deletion", path.name)
        if self._is_marked and marks:
            self.folder.files.mark(self.folder.mark(self._nonce))

    def _committed_elsewhere(self) -> frozenset[str]:
        """Return the attempts that any host has committed: what is prepared here of one is good. All ranks."""
        attempts: list[str] = []
        if self._leads:
            with contextlib.suppress(OSError):  # the sweep reports it
                paths = [self.folder.iteration(iteration) for iteration in self.folder.committed()]
                attempts = [attempt for path in paths if (attempt := attempt_of(path)) is not None]
        key = f"{self._key}/{self._nonce}/attempts"
        rows = self._channel.gather(key, json.dumps(attempts).encode())
        attempts = self._channel.from_first(f"{key}/all", lambda: [name for data in rows for name in json.loads(data)])
        return frozenset(attempts)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an error of the file system into that of a folder that cannot be written."""
        try:
            yield
        except OSError as error:
            what = "The folder of local checkpoints" if self._is_local else "The checkpoint folder"
            raise self.folder.cannot_write(error, what=what) from error

    def _agreed(self) -> AbstractContextManager[None]:
        """Let every rank go on after this block only if it raised nothing on any rank; see `StoreChannel.agreed`."""
        self._agreements += 1
        return self._channel.agreed(f"{self._key}/{self._nonce}/{self._agreements}")

    def require_shared(self) -> None:
        """Let every rank of a host find the mark that its leader has left in the folder, then remove it.

        Raises:
            CheckpointError: on every rank, if one of them does not see it.
        """
        if self._channel.world_size == 1:
            return
        mark = self.folder.mark(self._nonce)
        try:
            with self._agreed():
                if not self._leads:
                    require_mark(mark, self.folder, leader=self._channel.coordinator, is_local=self._is_local)
        finally:
            if self._leads and self._is_marked:
                with contextlib.suppress(OSError):  # the next start sweeps it
                    self.folder.files.remove_file(mark)

    def rewind(self, iteration: int, given_up: Collection[int], retention: Retention, saved: SavedIterations) -> None:
        """Rename checkpoints newer than `iteration` or `given_up`, then delete those that retention gives up."""
        with self._agreed(), self._writing():
            if not self._leads:
                return
            names = [*self.folder.committed(), *self.folder.non_folders()]
            overtaken = [number for number in names if number > iteration or number in given_up]
            for path in self.folder.supersede(overtaken):
                is_damaged = named_iteration(path.name) in saved.damaged
                what = "a damaged checkpoint" if is_damaged else "an abandoned branch of this run"
                _log.info("%s is kept as %s", what, path.name)
            self._retain(retention, saved)

    def release(self) -> None:
        """Remove what the next save would have overwritten, and let go of the lock."""
        if self.lock is None:
            return
        for path in self.folder.discarded(self._nonce):
            with contextlib.suppress(OSError):  # the next start sweeps it
                self.folder.files.remove_tree(path)
        self.lock.release()

    def _retain(self, retention: Retention, saved: SavedIterations) -> None:
        """Delete what retention gives up, if the newest was loaded and all of it checked: it is known to be good."""
        expired, committed = decide_expired(self.folder, retention)
        if not expired or not saved.is_verified(committed[-1]):
            return
        keep = retention.max_checkpoint_keep
        for iteration in delete(self.folder, expired, attempt=self._nonce, lock=self.lock):
            _log.info("deleted iteration %d, which %s=%d does not keep", iteration, self.folder.terms.keep, keep)
