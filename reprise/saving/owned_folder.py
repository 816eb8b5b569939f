"""The checkpoint folder while a run owns it: its leader holds its lock, and all the host's ranks see the same folder.

A shared folder is treated as a single host's folder, which has all ranks and is led by rank 0.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from reprise.commit.attempt import Attempt, Hosts
from reprise.errors import CheckpointError, LockError, TrainerError, UnreadableError
from reprise.format.host_file import attempt_of, path_of
from reprise.format.names import INTERIM, STATE
from reprise.ranks.channel import StoreChannel
from reprise.saving.policy import Retention
from reprise.storage import json_file
from reprise.storage.files import describe_free_space
from reprise.storage.folder import CheckpointFolder, Stamp
from reprise.storage.lock import FolderLock
from reprise.storage.shared_folder import require_lock

_log = logging.getLogger(__name__)


class OwnedFolder:
    """The folder for a run's saves, seen from a rank. All ranks make the same calls in the same order.

    Args:
        nonce: This launch's random name, equal on all ranks.
        hosts: The hosts, each with its own folder. None if all ranks share a folder.
    """

    def __init__(self, folder: CheckpointFolder, channel: StoreChannel, nonce: str, hosts: Hosts | None = None) -> None:
        self.folder = folder
        self.hosts = hosts or Hosts.of(channel.ranks)
        self._channel, self._nonce = channel, nonce
        self._is_local = hosts is not None
        lock = partial(FolderLock, another=folder.terms.another, is_local=self._is_local)
        self.lock = lock(folder.root, nonce, owner=self) if channel.rank in self.hosts.leaders else None
        self._key = f"folder/{nonce}"
        self._agreements = 0

    def acquire(self) -> None:
        """Take the lock, clean up after dead attempts, and check whether each host's ranks see the same folder.

        Raises:
            LockError: Another job writes to the folder. Every rank raises.
            CheckpointError: The folder cannot be written, or a rank does not see its leader's lock there. Every rank
                raises.
        """
        elsewhere, ranks = frozenset[str](), self.hosts.ranks_with(self._channel.rank)
        if self._is_local:
            with self._leading() as leads:
                if leads is not None:
                    leads.acquire()
            elsewhere = self._committed_elsewhere()
        with self._leading() as leads:
            if leads is not None:
                self.take(elsewhere)
                if len(ranks) > 1:
                    leads.check()  # synced, so the others can read it
        with self._leading() as leads:
            if leads is None:
                require_lock(self.folder, self._nonce, leader=ranks[0])

    def take(self, elsewhere: Collection[str] = ()) -> None:
        """Take the lock and clean up after dead attempts, on a leader alone.

        Args:
            elsewhere: Attempts committed by another host, which are completed here. All others are swept.

        Raises:
            LockError: Another job writes to the folder.
            CheckpointError: The folder cannot be written.
        """
        folder = self.folder
        with folder.writing():
            assert self.lock is not None
            self.lock.acquire()
            for iteration, attempt in folder.partials():
                if attempt in elsewhere and attempt_of(folder.partial(iteration, attempt)) == attempt:
                    folder.commit(iteration, attempt)
                    _log.warning("completed iteration %d on this host, since another host has committed it", iteration)
            for path in folder.sweep():
                _log.info("swept %s, left by an interrupted save or deletion", path.name)

    def _committed_elsewhere(self) -> frozenset[str]:
        """Return all attempts committed on some host, whose prepared parts are valid on the others. All ranks."""
        attempts = list[str | None]()
        if self.lock is not None:
            with contextlib.suppress(OSError):  # the sweep reports it
                attempts = [attempt_of(self.folder.iteration(iteration)) for iteration in self.folder.committed()]
        rows = self._channel.gather(f"{self._key}/attempts", json.dumps(attempts).encode())
        names = {name for data in rows for name in json.loads(data)} - {None}
        return frozenset(self._channel.from_first(f"{self._key}/attempts/all", lambda: sorted(names)))

    @contextlib.contextmanager
    def _leading(self) -> Iterator[FolderLock | None]:
        """Yield the lock if this rank leads a host. An exception in the block on any rank is raised on every rank."""
        self._agreements += 1
        with self._channel.agreed(f"{self._key}/{self._agreements}"), self.folder.writing():
            yield self.lock

    def rewind(
        self,
        iteration: int,
        given_up: Collection[int],
        retention: Retention,
        *,
        verified: int,
    ) -> None:
        """Rename checkpoints newer than `iteration` or in `given_up`, then delete those expired by retention.

        Args:
            verified: The iteration loaded with all digests checked, or -1. Checkpoints are deleted only if it is the
                newest, so at least a good one stays.
        """
        with self._leading() as lock:
            if lock is None:
                return
            overtaken = [number for number in self.folder.taken() if number > iteration or number in given_up]
            for path in self.folder.supersede(overtaken):
                _log.info("an overtaken checkpoint of this run is kept as %s", path.name)
            expired = decide_expired(self.folder, retention)
            if not expired or self.folder.committed()[-1] != verified:
                return
            rule = f"{self.folder.terms.keep}={retention.max_checkpoint_keep}"
            for number in delete(self.folder, expired, attempt=self._nonce, lock=lock):
                _log.info("deleted iteration %d, which %s does not keep", number, rule)

    def release(self) -> None:
        """Release the lock."""
        if self.lock is not None:
            self.lock.release()


def decide_expired(folder: CheckpointFolder, retention: Retention, *, pinned: Collection[int] = ()) -> list[int]:
    """Return the iterations expired by retention. Empty if listing fails.

    Args:
        pinned: Iterations to keep in addition to held ones.
    """
    losses, interim, kept = dict[int, float | None](), set[int](), {*pinned}
    try:
        stamps = folder.stamps()
        for iteration, stamp in stamps.items() if retention.max_checkpoint_keep else ():
            path = folder.iteration(iteration)
            try:
                losses[iteration], is_interim = _record_of(path, stamp)
                interim |= {iteration} if is_interim else set()
            except TrainerError as error:
                kept |= {iteration} if isinstance(error, UnreadableError) else set()  # it may be the best
                _log.error("the validation loss of %s cannot be read: %s", path, error)
        expired = retention.expired(stamps, pinned=kept, losses=losses, interim=interim)
        protected = {*folder.held(expired)}
    except OSError as error:
        _log.error("%s cannot be listed, nothing is deleted: %s", folder.root, error)
        return []
    if retention.mirror is not None and expired:
        protected |= {*retention.mirror.unmirrored(folder.root, [*stamps], expired)}
    return [iteration for iteration in expired if iteration not in protected]


def delete(folder: CheckpointFolder, iterations: Sequence[int], *, attempt: str, lock: FolderLock | None) -> list[int]:
    """Delete committed iterations and return the deleted ones; log the others. Leaders only.

    An iteration with a hold by now stays.

    Args:
        attempt: A name for the folders being deleted, never used before in this folder.
        lock: Checked again before each deletion.
    """
    deleted = []
    for iteration in iterations:
        try:
            if lock is not None:
                lock.check()
            if folder.delete(folder.iteration(iteration), attempt):
                deleted.append(iteration)
            else:
                _log.info("iteration %d is kept, since a reader now holds it", iteration)
        except (OSError, LockError) as error:
            _log.error("iteration %d could not be deleted: %s", iteration, error)
    return deleted


@functools.lru_cache(maxsize=1 << 16)
def _record_of(path: Path, stamp: Stamp) -> tuple[float | None, bool]:
    """Return a checkpoint's validation loss, and whether the checkpoint is interim.

    Results are cached, since a run reads all its checkpoints after every save and they do not change. A checkpoint
    saved again lies in a new folder.

    Args:
        stamp: The folder's stamp, part of the cache key.

    Raises:
        TrainerError: The state cannot be read. Nothing is cached.
    """
    state = json_file.read(path_of(path, STATE))
    loss = state.get("valid_loss")
    # Losses are written as floats; `json_file` rejects NaN.
    return (float(loss) if isinstance(loss, float) else None), state.get(INTERIM) is True


def require_room(
    attempt: Attempt,
    documents: Mapping[str, json_file.Document],
    retention: Retention,
    *,
    parts: int = 1,
    lock: FolderLock | None = None,
) -> None:
    """Fail if tensors and documents would not fit on the disk beside the present files.

    On a full disk, checkpoints kept only until the mirror has them are deleted first.

    Args:
        retention: The run's retention, which has not yet deleted anything for this save.
        parts: How many folders share the tensors, about evenly.

    Raises:
        CheckpointError: There is too little space, or it cannot be measured.
    """
    folder, files, layout = attempt.folder, attempt.folder.files, attempt.layout
    # An upper bound: tensor files, and JSON files in proportion to tensors and digests.
    json_bytes = (64 << 10) + 1024 * len(layout.places) + layout.total_bytes // (128 << 10)
    needed = (layout.total_bytes + json_bytes) // parts
    needed += sum(len(data) for data in documents.values() if isinstance(data, bytes))

    def missing_bytes() -> int:
        with folder.writing():
            free = files.free_bytes(folder.root)
            # Measured second: blocks that other ranks reserve meanwhile may count twice, but are never missed.
            return 0 if free is None else needed - free - files.allocated_bytes(attempt.partial)

    if retention.mirror is not None and missing_bytes() > 0:
        expired = decide_expired(folder, replace(retention, mirror=None))
        for iteration in delete(folder, expired, attempt=attempt.name, lock=lock):
            _log.warning("the disk is full: deleted iteration %d, which the store may not have yet", iteration)
    if (missing := missing_bytes()) > 0:
        raise CheckpointError(
            "There is no room for a checkpoint",
            where=folder.root,
            expected=f"{needed} B free",
            found=describe_free_space(files, folder.root),
            fix=f"Free {missing} B more: delete abandoned branches (*.superseded-*), restart with "
            f"{folder.terms.keep}=1, which deletes older checkpoints, or name {folder.terms.another}.",
        )
