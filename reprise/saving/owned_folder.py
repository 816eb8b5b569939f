"""The checkpoint folder while a run owns it: its leader holds its lock, all ranks of the host see the same folder.

A shared folder counts as the folder of a single host with all ranks, led by rank 0.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from reprise.commit import messages
from reprise.commit.attempt import Attempt, Hosts, SharedCommitState
from reprise.commit.commit_state import Outcome
from reprise.errors import CheckpointError, LockError, TrainerError, UnreadableError, count_of
from reprise.format.host_file import attempt_of, path_of
from reprise.format.layout import Layout
from reprise.format.names import HOST, INTERIM, STATE
from reprise.ranks.channel import StoreChannel
from reprise.saving.policy import Retention
from reprise.storage import json_file
from reprise.storage.atomic import temporary_of
from reprise.storage.folder import CheckpointFolder, Stamp, iteration_name, named_iteration
from reprise.storage.lock import FolderLock
from reprise.storage.shared_folder import require_mark

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InDoubt:
    """An attempt in doubt: this rank stopped waiting while it could still be committed. It holds none of its bytes."""

    attempt: Attempt
    shared: SharedCommitState
    has_optimizer: bool

    def is_committed(self) -> bool:
        """Return whether it became a checkpoint after all. Main thread."""
        outcome = self.shared.current.outcome
        return outcome is Outcome.COMMITTED or (outcome is not Outcome.FAILED and messages.is_committed(self.attempt))


class SavedIterations:
    """The newest checkpoint saved or loaded by this process, and what may have become a checkpoint. Main thread.

    Only the newest is asked about: a run ends with a save of the iteration just saved or loaded. An older
    iteration is saved again, whether retention has deleted it or not.
    """

    def __init__(self) -> None:
        self._newest: tuple[int, bool] | None = None  # the iteration, and whether it holds optimizer state
        self._verified: int | None = None  # a loaded checkpoint of which all digests were checked
        self._outdated: tuple[int, bool] | None = None  # a loaded checkpoint, like `_newest`, to be saved again
        self.damaged: frozenset[int] = frozenset()  # checkpoints that the load skipped
        self.in_doubt: list[InDoubt] = []  # in the order of the attempts

    def has(self, iteration: int, *, with_optimizer: bool) -> bool:
        """Return whether `iteration` is saved already, with its optimizer state if asked for."""
        return self._newest is not None and self._newest[0] == iteration and self._newest[1] >= with_optimizer

    def committed(self, iteration: int, *, has_optimizer: bool) -> None:
        """Take note of a commit. Rank 0 makes its attempts in sequence, so all before it are decided."""
        self._newest = iteration, has_optimizer
        self.in_doubt.clear()

    def loaded(self, iteration: int, has_optimizer: bool, *, is_verified: bool) -> None:
        """Take note of a loaded checkpoint of this run's folder: it is there."""
        self._newest = iteration, has_optimizer
        self._verified = iteration if is_verified else None

    def is_verified(self, iteration: int) -> bool:
        """Return whether this process has loaded `iteration` and checked all of it."""
        return self._verified == iteration

    def outdated(self, iteration: int) -> None:
        """Let `iteration` be saved again, in place of the loaded checkpoint.

        A checkpoint not loaded by this process is another: nothing shows it may go.
        """
        if self._newest is not None and self._newest[0] == iteration:
            self._newest, self._outdated = None, self._newest

    def gives_way(self, iteration: int, *, with_optimizer: bool) -> bool:
        """Return whether the checkpoint of `iteration` is outdated, and a save of it has everything in it."""
        return self._outdated is not None and self._outdated[0] == iteration and with_optimizer >= self._outdated[1]

    def rewound(self, iteration: int) -> None:
        """Forget checkpoints newer than `iteration`, which were renamed."""
        if self._newest is not None and self._newest[0] > iteration:
            self._newest = None
        self.in_doubt = [candidate for candidate in self.in_doubt if candidate.attempt.iteration <= iteration]

    def settle(self, rank: int) -> None:
        """Find out which attempts in doubt were committed all the same: of several, the last attempt counts."""
        for number, candidate in reversed(list(enumerate(self.in_doubt))):
            if candidate.is_committed():
                _log.info("iteration %d, in doubt on rank %d, was committed", candidate.attempt.iteration, rank)
                self._newest = candidate.attempt.iteration, candidate.has_optimizer
                del self.in_doubt[: number + 1]
                break
        self.in_doubt = [
            candidate for candidate in self.in_doubt if candidate.shared.current.outcome is not Outcome.FAILED
        ]


class OwnedFolder:
    """The folder of a run's saves, on one rank. All ranks make the same calls in the same order.

    Args:
        nonce: a name of this run of the program, equal on all ranks.
        hosts: the hosts with a folder of their own each; None for a folder of all ranks.
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
        """Take the lock, settle what dead attempts left, and leave the mark for `require_shared`.

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
            marks: leave the mark for `require_shared`.

        Raises:
            LockError: if another job writes to the folder.
            CheckpointError: if the folder cannot be written.
        """
        with self._writing():
            self._take_lock()
            self._settle(frozenset(), marks=marks)

    def _take_lock(self) -> None:
        self.lock = FolderLock(
            self.folder.root,
            self._nonce,
            another=self.folder.terms.another,
            is_local=self._is_local,
            files=self.folder.files,
            owner=self,
        )
        self.lock.acquire()

    def _settle(self, elsewhere: Collection[str], *, marks: bool) -> None:
        """Complete the attempts committed by another host, sweep all others, and mark the folder."""
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
        """Return the attempts committed by any host: what is prepared here of them is good. All ranks."""
        attempts: list[str] = []
        if self._leads:
            with contextlib.suppress(OSError):  # the sweep reports it
                paths = [self.folder.iteration(iteration) for iteration in self.folder.committed()]
                attempts = [attempt for path in paths if (attempt := attempt_of(path)) is not None]
        key = f"{self._key}/{self._nonce}/attempts"
        rows = self._channel.gather(key, json.dumps(attempts).encode())
        attempts = self._channel.from_first(
            f"{key}/all", lambda: sorted({name for data in rows for name in json.loads(data)})
        )
        return frozenset(attempts)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an error of the file system into the error of a folder without write access."""
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
        """Let every rank of a host find the mark of its leader in the folder, then remove it.

        Raises:
            CheckpointError: on every rank, if one of them does not see it.
        """
        if self._channel.world_size == 1:
            return
        mark = self.folder.mark(self._nonce)
        try:
            with self._agreed():
                if not self._leads:
                    leader = self.hosts.ranks_with(self._channel.rank)[0]
                    require_mark(mark, self.folder, leader=leader, is_local=self._is_local)
        finally:
            if self._leads and self._is_marked:
                with contextlib.suppress(OSError):  # the next start sweeps it
                    self.folder.files.remove_file(mark)

    def rewind(self, iteration: int, given_up: Collection[int], retention: Retention, saved: SavedIterations) -> None:
        """Rename checkpoints newer than `iteration` or `given_up`, then delete those given up by retention."""
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
        """Release the lock."""
        if self.lock is not None:
            self.lock.release()

    def _retain(self, retention: Retention, saved: SavedIterations) -> None:
        """Delete what retention gives up, if the newest was loaded and all of it checked: it is known to be good."""
        expired, committed = decide_expired(self.folder, retention)
        if not expired or not saved.is_verified(committed[-1]):
            return
        keep = retention.max_checkpoint_keep
        for iteration in delete(self.folder, expired, attempt=self._nonce, lock=self.lock):
            _log.info("deleted iteration %d, which %s=%d does not keep", iteration, self.folder.terms.keep, keep)


def decide_expired(
    folder: CheckpointFolder, retention: Retention, *, pinned: Collection[int] = ()
) -> tuple[list[int], list[int]]:
    """Return the iterations given up by retention, and all committed ones; none where the folder cannot be listed.

    Args:
        pinned: iterations to keep, beside the held ones.
    """
    try:
        stamps = folder.stamps()
        committed = sorted(stamps)
        records = _Records.of(folder, stamps if retention.max_checkpoint_keep else {})
        pinned = {*pinned, *records.unknown}
        expired = retention.expired(committed, pinned=pinned, losses=records.losses, interim=records.interim)
        protected = {*folder.held(expired)}
    except OSError as error:
        _log.error("%s cannot be listed, nothing is deleted: %s", folder.root, error)
        return [], []
    expired = [iteration for iteration in expired if iteration not in protected]
    if retention.mirror is not None and expired:
        unmirrored = retention.mirror.unmirrored(folder.root, committed, expired)
        expired = [iteration for iteration in expired if iteration not in unmirrored]
    return expired, committed


def delete(folder: CheckpointFolder, iterations: Sequence[int], *, attempt: str, lock: FolderLock | None) -> list[int]:
    """Delete committed iterations and return the deleted ones; a line of the log names the others. Rank 0 only.

    An iteration held by now stays.

    Args:
        attempt: names the folders on their way out; unique in the life of the folder.
        lock: looked at again before each of them.
    """
    deleted = []
    for iteration in iterations:
        try:
            if lock is not None:
                lock.check()
            path = folder.discard(iteration, attempt)
            if path is None:
                _log.info("iteration %d stays, somebody has begun to read it", iteration)
                continue
            folder.files.remove_tree(path)
            deleted.append(iteration)
        except (OSError, LockError) as error:
            _log.error("iteration %d could not be deleted: %s", iteration, error)
    return deleted


@dataclass(slots=True)
class _Records:
    """What retention reads from the state files of checkpoints.

    Args:
        losses: validation loss by iteration, of the evaluated ones.
        interim: those made where a run was interrupted.
        unknown: those whose state cannot be read now: any of them may be the best.
    """

    losses: dict[int, float] = field(default_factory=dict)
    interim: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)

    @staticmethod
    def of(folder: CheckpointFolder, stamps: Mapping[int, Stamp]) -> _Records:
        """Read the records of these iterations, unless this process has."""
        records = _Records()
        for iteration, stamp in stamps.items():
            place = f"{folder.root}/{iteration_name(iteration)}"
            try:
                loss, is_interim = _record_of(place, stamp)
            except UnreadableError as error:
                _log.error("iteration %d stays, its loss is not known: %s", iteration, error)
                records.unknown.add(iteration)
                continue
            except TrainerError as error:
                _log.error("the loss of %s counts for nothing: %s", place, error)
                continue
            if loss is not None:
                records.losses[iteration] = loss
            if is_interim:
                records.interim.add(iteration)
        return records


@functools.lru_cache(maxsize=1 << 16)
def _record_of(place: str, stamp: Stamp) -> tuple[float | None, bool]:
    """Return the validation loss of a checkpoint, and whether the checkpoint is interim.

    Remembered, since a run looks at all its checkpoints after every save, and they do not change. A checkpoint that is
    saved again lies in a new folder.

    Args:
        stamp: of the folder.

    Raises:
        TrainerError: if the state cannot be read; then nothing is remembered.
    """
    state = json_file.read(path_of(Path(place), STATE))
    loss = state.get("valid_loss")
    # As a loss is written; `json_file` lets no NaN through.
    return (float(loss) if isinstance(loss, float) else None), state.get(INTERIM) is True


def _needed_bytes(layout: Layout) -> int:
    """Return the largest size of a checkpoint: tensor files, and JSON files in proportion to tensors and digests."""
    return layout.total_bytes + (64 << 10) + 1024 * len(layout.places) + layout.total_bytes // (128 << 10)


def give_up_unmirrored(attempt: Attempt, retention: Retention, lock: FolderLock | None) -> None:
    """Delete, on a full disk, what retention keeps for the mirror alone, and name it. Rank 0 only."""
    kept, _ = decide_expired(attempt.folder, retention)
    expired, _ = decide_expired(attempt.folder, replace(retention, mirror=None))
    for iteration in delete(attempt.folder, sorted({*expired} - {*kept}), attempt=attempt.name, lock=lock):
        _log.warning("the disk is full: iteration %d is deleted before the store has it", iteration)


def require_room(
    attempt: Attempt,
    documents: Mapping[str, json_file.Document],
    retention: Retention,
    *,
    parts: int = 1,
    lock: FolderLock | None = None,
) -> None:
    """Refuse to begin where tensors and documents would not fit beside the present files.

    On a full disk, checkpoints kept for the mirror alone are deleted first.

    Args:
        retention: of the saving run, for the advice: it has not deleted anything for this save yet.
        parts: how many folders share the tensors, about evenly.
    """
    folder, files = attempt.folder, attempt.folder.files
    needed = _needed_bytes(attempt.layout) // parts + sum(
        len(data) for data in documents.values() if isinstance(data, bytes)
    )
    try:
        free = files.free_bytes(folder.root)
        # Looked at afterwards: what other ranks reserve meanwhile may count twice, but is never missing.
        allocated = files.allocated_bytes(attempt.partial)
    except OSError as error:
        raise folder.cannot_write(error) from error
    if free is not None and free + allocated < needed and retention.mirror is not None:
        give_up_unmirrored(attempt, retention, lock)
        require_room(attempt, documents, replace(retention, mirror=None), parts=parts)
        return
    if free is not None and free + allocated < needed:
        raise CheckpointError(
            "There is no room for a checkpoint",
            where=folder.root,
            expected=f"{needed} B free",
            found=f"{free} B free",
            fix=_advice(folder, retention, short_bytes=needed - free - allocated),
        )


def _advice(folder: CheckpointFolder, retention: Retention, *, short_bytes: int) -> str:
    """Return how to make room: what could be deleted, and by what."""
    older, committed = decide_expired(folder, replace(retention, max_checkpoint_keep=1))
    abandoned, parts = folder.superseded(), []
    if older:
        allocated = folder.files.allocated_bytes(*map(folder.iteration, older))
        name = folder.terms.keep
        parts.append(
            f"{count_of(len(older), 'older checkpoint')} there: {allocated} B, deleted by the next start with {name}=1."
        )
    if abandoned:
        allocated = folder.files.allocated_bytes(*abandoned)
        branches = count_of(len(abandoned), "abandoned branch", "es")
        parts.append(f"{branches} there (*.superseded-*): {allocated} B, to be deleted.")
    if not parts:
        reason = ": the newest stays until the next is complete" if committed else ""
        parts.append(f"No checkpoint there can be deleted{reason}.")
    return f"Free {short_bytes} B more, or name {folder.terms.another}. {' '.join(parts)}"
