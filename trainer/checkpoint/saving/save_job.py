"""One save under way: write, check, commit, delete what may go. `saver.py` starts it and waits for it."""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.checkpoint.commit import protocol as commit
from trainer.checkpoint.commit.channel import StoreChannel
from trainer.checkpoint.commit.commit_state import Outcome
from trainer.checkpoint.commit.inventory import Inventory
from trainer.checkpoint.commit.protocol import Attempt, BeginRename, SharedCommitState
from trainer.checkpoint.format import json_file
from trainer.checkpoint.format.layout import Layout, TensorKind
from trainer.checkpoint.format.manifest import Written, WrittenPiece
from trainer.checkpoint.format.names import STATE
from trainer.checkpoint.policy import Retention
from trainer.checkpoint.saving.column_sharing import LocalRanks, Sharing
from trainer.checkpoint.saving.plan import Plan
from trainer.checkpoint.saving.replica_digests import ReplicaDigests
from trainer.checkpoint.saving.snapshot import Snapshot
from trainer.checkpoint.saving.writer import THREADS, Writer, writing_failed
from trainer.checkpoint.storage.folder import CheckpointFolder
from trainer.checkpoint.storage.lock import FolderLock
from trainer.checkpoint.storage.progress_line import ProgressLine
from trainer.checkpoint.storage.shared_folder import require_mark, sees_mark, unchanged
from trainer.checkpoint.storage.worker import Worker
from trainer.checkpoint.tensors.live import Contents
from trainer.errors import CheckpointError, LaunchError, LockError, TrainerError, UnreadableError

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class InDoubt:
    """What it takes to learn later what became of a save: nothing of its bytes.

    Args:
        present: the iterations that this rank knows to be there.
        pinned: iterations that retention leaves alone.
        expired: the iterations that are no longer there because of it, as far as that is known.
    """

    attempt: Attempt
    shared: SharedCommitState
    has_optimizer: bool
    retention: Retention
    present: Collection[int]
    pinned: Collection[int]
    expired: list[int] = field(default_factory=list)

    def look_again(self) -> bool:
        """Return whether it became a checkpoint after this rank had given it up. Main thread."""
        outcome = self.shared.current.outcome
        if outcome is Outcome.FAILED or (outcome is not Outcome.COMMITTED and not commit.is_committed(self.attempt)):
            return False
        self.expired = self.guess_expired()
        return True

    def guess_expired(self) -> list[int]:
        """Find out what the lost decision said: what rank 0 has deleted is gone, the rest it decides like this."""
        expired, committed = self.decide_expired()
        return [*expired, *(iteration for iteration in self.present if iteration not in committed)]

    def decide_expired(self) -> tuple[list[int], list[int]]:
        """Return what retention gives up now that the attempt is committed, and all that is committed."""
        return decide_expired(self.attempt.folder, self.retention, pinned={*self.pinned, self.attempt.iteration})


@dataclass(slots=True)
class SaveJob:
    """A save of one rank, and what became of it: `run` is called once, on the worker thread of every rank.

    Args:
        replicas: digests of what other ranks hold too.
        channel: the worker thread's.
        shared: what this rank knows of the attempt; the main thread may abort on it.
        present: the iterations that this rank knows to be there.
        pinned: iterations that retention leaves alone.
        local_ranks: the ranks of this host, for columns that become whole rows in memory that they share.
        may_share: whether this rank has the memory for that.
        leftovers: partial folders of attempts that were given up, to be removed.
        stale: keys of what this rank has posted about attempts that failed; emptied by `run` once they are taken down,
            after the commit, as all ranks are past them then.
        expired: set by `run`: the iterations that are no longer there, as rank 0 decided it.
        committed_at: set by `run`: when the checkpoint was there, on the clock of `time.perf_counter`.
    """

    attempt: Attempt
    contents: Contents
    plan: Plan
    snapshot: Snapshot
    replicas: ReplicaDigests
    channel: StoreChannel
    shared: SharedCommitState
    lock: FolderLock | None
    retention: Retention
    present: Collection[int]
    pinned: Collection[int]
    local_ranks: LocalRanks
    may_share: bool = False
    leftovers: Sequence[Path] = ()
    stale: Sequence[str] = ()
    expired: list[int] = field(default_factory=list)
    committed_at: float | None = None
    inventory: Inventory = field(init=False)

    def __post_init__(self) -> None:
        self.inventory = Inventory(self.plan.layout, self.plan.live)

    @property
    def blocked_s(self) -> float:
        """Return for how long the optimizer's step was held back."""
        return self.snapshot.blocked_s + self.replicas.blocked_s

    def release(self) -> None:
        """Let live memory change: copy and digest the rest of it. Main thread."""
        self.snapshot.release()
        self.replicas.release()

    @property
    def has_optimizer(self) -> bool:
        return any(spec.kind is TensorKind.OPTIMIZER for spec in self.contents.specs)

    @property
    def written_bytes(self) -> int:
        return sum(piece.hi - piece.lo for piece in self.plan.pieces)

    def run(self) -> None:
        """Write, check, commit, then delete what may go.

        Raises:
            TrainerError: on every rank, if the attempt did not become a checkpoint; a LockError on rank 0, if another
                job has taken the folder over meanwhile.
        """
        partial = self.attempt.folder.partial(self.attempt.iteration, self.attempt.name)
        try:
            expired = commit.exchange(
                self.channel,
                self.attempt,
                inventory=self.inventory,
                work=lambda: self._work(partial),
                publish=self._publish,
                shared=self.shared,
            )
        except BaseException as error:
            self.local_ranks.drop()
            self._remove(partial)
            if isinstance(error, TrainerError) and self.lock is not None:
                self.lock.refuse_if_taken()  # a successor sweeps what is being written: that was no fault of the disk
            raise
        finally:
            for path in self.leftovers:
                self._remove(path)
        self.committed_at = time.perf_counter()
        if expired is None:
            self.expired = self.in_doubt.guess_expired()
            return
        self.expired = expired
        if self.channel.rank == 0:
            delete(self.attempt.folder, expired, attempt=self.attempt.name, lock=self.lock)
        self._discard_stale()

    @property
    def in_doubt(self) -> InDoubt:
        return InDoubt(self.attempt, self.shared, self.has_optimizer, self.retention, self.present, self.pinned)

    def _work(self, partial: Path) -> Written:
        if self.channel.rank == 0:
            return self._write(partial)
        with unchanged(self.attempt.folder.root) as require_unchanged:
            written = self._write(partial)
            self._require_mark(partial)
            require_unchanged()
            return written

    def _begin(self, partial: Path) -> Sharing | None:
        """Meet the other ranks of the host; on rank 0 leave the mark, and tell the others what came of it."""
        attempt, is_marked = self.attempt, False
        try:
            sharing = self.local_ranks.join(attempt, self.plan.columns, may_share=self.may_share)
            if self.channel.rank == 0:
                require_room(attempt, self.contents.documents, self.retention)
                if self.channel.world_size > 1:
                    _leave_mark(attempt, partial)
                is_marked = True
            return sharing
        finally:
            if self.channel.rank == 0:
                commit.say_marked(self.channel, attempt, is_marked=is_marked)

    def _require_mark(self, partial: Path) -> None:
        """Return if this rank has written into the folder of rank 0, or rank 0 ends the attempt for another reason.

        Raises:
            TrainerError: if it has written elsewhere, which is removed, or rank 0 says nothing.
        """
        attempt, files = self.attempt, self.attempt.folder.files
        if sees_mark(attempt.mark, files):
            return
        if not commit.await_marked(self.channel, attempt, check=self.snapshot.check):
            return
        try:
            require_mark(attempt.mark, files)
        except TrainerError:
            with contextlib.suppress(OSError):
                files.remove_tree(partial)
            raise

    def _write(self, partial: Path) -> Written:
        attempt = self.attempt
        line = ProgressLine(f"saving iteration {attempt.iteration}", self.written_bytes)
        digesting = Worker("checkpoint-replicas")
        try:
            digested = digesting.submit(self.replicas.run)
            sharing = self._begin(partial)
            writer = Writer(
                partial, attempt.folder.files, attempt.layout, self.channel.rank, THREADS, line.add, sharing
            )
            written = writer.write(self.plan.pieces, self.plan.chunks, self.snapshot)
            self.snapshot.check()
            digested.wait()
            self.inventory.add(self.replicas.all(written))
            return written
        finally:
            self.snapshot.close()
            digesting.close()

    def _publish(self, written: list[WrittenPiece], begin_rename: BeginRename) -> list[int]:
        documents, aliases = self.contents.documents, self.contents.aliases
        if self.channel.world_size > 1:
            _remove_mark(self.attempt)
        is_durable = commit.publish(
            self.attempt, written, documents=documents, aliases=aliases, lock=self.lock, begin_rename=begin_rename
        )
        return self.in_doubt.decide_expired()[0] if is_durable else []

    def _discard_stale(self) -> None:
        try:
            self.channel.discard(self.stale)
            self.stale = ()
        except LaunchError as error:
            _log.error("what is left of failed saves stays in the store: %s", error)

    def _remove(self, partial: Path) -> None:
        if self.channel.rank:
            return
        try:
            self.attempt.folder.files.remove_tree(partial)
        except OSError as error:
            _log.error("%s could not be removed, the next start sweeps it: %s", partial, error)


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """Return what to raise where the checkpoint folder cannot be written at all."""
    fix = "Mend the file system, or name another folder with checkpoint.save."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = "Make room. A run deletes at its start what checkpoint.max_checkpoint_keep does not keep."
    return CheckpointError(
        f"The checkpoint folder cannot be written: {error.strerror} (errno {error.errno})",
        where=error.filename or path,
        fix=fix,
    )


def decide_expired(
    folder: CheckpointFolder, retention: Retention, *, pinned: Collection[int]
) -> tuple[list[int], list[int]]:
    """Return what retention gives up, and all that is committed; both empty where the folder cannot be listed.

    Args:
        pinned: iterations that stay, beside those with a `hold` file.
    """
    try:
        committed = folder.committed()
        held = folder.held(committed)
    except OSError as error:
        _log.error("%s cannot be listed, nothing is deleted: %s", folder.root, error)
        return [], []
    losses, unknown = _losses(folder, committed) if retention.keep_best else ({}, [])
    return retention.expired(committed, pinned={*pinned, *held, *unknown}, losses=losses), committed


def delete(folder: CheckpointFolder, iterations: Sequence[int], *, attempt: str, lock: FolderLock | None) -> list[int]:
    """Delete committed iterations and return those that are gone; a line of the log names the others. Rank 0 only.

    Args:
        attempt: names the folders on their way out; unique in the life of the folder.
        lock: looked at again before each of them.
    """
    gone = []
    for iteration in iterations:
        try:
            if lock is not None:
                lock.check()
            folder.files.remove_tree(folder.discard(iteration, attempt))
            gone.append(iteration)
        except (OSError, LockError) as error:
            _log.error("iteration %d could not be deleted: %s", iteration, error)
    return gone


def _losses(folder: CheckpointFolder, iterations: Sequence[int]) -> tuple[dict[int, float], list[int]]:
    """Return the validation loss of the checkpoints that were evaluated when they were saved.

    Second are those whose state cannot be read now: any of them may be the best.
    """
    found, unknown = {}, []
    for iteration in iterations:
        path = folder.iteration(iteration) / STATE
        try:
            loss = json_file.read(path).get("valid_loss")
        except UnreadableError as error:
            _log.error("iteration %d stays, its loss is not known: %s", iteration, error)
            unknown.append(iteration)
            continue
        except TrainerError as error:
            _log.error("%s cannot be read, its loss counts for nothing: %s", path, error)
            continue
        if isinstance(loss, float):  # as a loss is written; `json_file` lets no NaN through
            found[iteration] = float(loss)
    return found, unknown


def _needed_bytes(layout: Layout) -> int:
    """Return what a checkpoint takes at most: the tensor files, and JSON files that grow with tensors and digests."""
    return layout.total_bytes + (64 << 10) + 1024 * len(layout.places) + layout.total_bytes // (128 << 10)


def _leave_mark(attempt: Attempt, partial: Path) -> None:
    files = attempt.folder.files
    try:
        files.make_folder(partial)
        files.mark(attempt.mark)
    except OSError as error:
        raise _marking_failed(attempt, error) from error


def _remove_mark(attempt: Attempt) -> None:
    """Remove the mark, which all ranks have seen; the sync before the rename makes that durable."""
    try:
        attempt.folder.files.remove_file(attempt.mark)
    except OSError as error:
        raise _marking_failed(attempt, error) from error


def _marking_failed(attempt: Attempt, error: OSError) -> CheckpointError:
    folder = attempt.folder
    return writing_failed(attempt.mark, error, folder.files, root=folder.root, total_bytes=attempt.layout.total_bytes)


def require_room(
    attempt: Attempt, documents: Mapping[str, json_file.Document], retention: Retention | None = None
) -> None:
    """Refuse to begin where tensors and documents would not fit beside all that is there.

    Args:
        retention: of the run that saves, for the advice: it has not deleted anything for this save yet.
    """
    folder, files = attempt.folder, attempt.folder.files
    needed = _needed_bytes(attempt.layout) + sum(len(data) for data in documents.values() if isinstance(data, bytes))
    try:
        free = files.free_bytes(folder.root)
        # Looked at afterwards: what other ranks reserve meanwhile may count twice, but is never missing.
        taken = files.allocated_bytes(folder.partial(attempt.iteration, attempt.name))
    except OSError as error:
        raise cannot_write(folder.root, error) from error
    if free is not None and free + taken < needed:
        raise CheckpointError(
            "There is no room for a checkpoint",
            where=folder.root,
            expected=f"{needed} B free",
            found=f"{free} B free",
            fix=_advice(retention),
        )


def _advice(retention: Retention | None) -> str:
    """Return how to make room: a smaller `max_checkpoint_keep` acts at the start of a run."""
    if retention is None:
        return "Make room, or name another folder."
    if retention.max_checkpoint_keep == 1:
        return "Make room: the next checkpoint is written before an older one is deleted, and one is kept already."
    if retention.max_checkpoint_keep == 0:
        smaller, kept = "checkpoint.max_checkpoint_keep=1 or more", "all are kept"
    else:
        smaller, kept = "a smaller checkpoint.max_checkpoint_keep", f"{retention.max_checkpoint_keep} are kept"
    return f"Make room, or start the run again with {smaller}: the start deletes what is beyond it; now {kept}."
