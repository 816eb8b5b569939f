"""A save on the worker thread: write, vote, prepare, rename, broadcast, then delete expired checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from reprise.commit import finish, messages
from reprise.commit.attempt import Attempt, SharedCommitState
from reprise.commit.commit_state import Outcome
from reprise.commit.hosts_commit import HostsCommit, LocalSaves
from reprise.commit.joint_plan import KnownPlans, encode
from reprise.commit.protocol import TwoPhaseCommit
from reprise.commit.replicas import ReplicaDigests
from reprise.errors import CheckpointError, LaunchError, TrainerError
from reprise.format.manifest import TensorEntry, Written
from reprise.ranks.channel import StoreChannel
from reprise.saving.column_sharing import LocalRanks
from reprise.saving.owned_folder import decide_expired, delete, require_room
from reprise.saving.plan import Plan
from reprise.saving.policy import Retention, SaveReport
from reprise.saving.snapshot import Snapshot
from reprise.saving.writer import Writer, writing_failed
from reprise.storage.holds import is_held
from reprise.storage.lock import FolderLock
from reprise.storage.progress_line import ProgressLine
from reprise.storage.shared_folder import leave_sign, require_signs, require_view, view_of
from reprise.storage.worker import Job
from reprise.tensors.live import Contents

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class SaveJob:
    """A rank's part in a save. Every rank calls `run` once, on its worker thread.

    Args:
        replicas: Digests of tensors to compare with other ranks.
        channel: The worker thread's channel.
        shared: The attempt's commit state on this rank, which the main thread may abort.
        retention: Which checkpoints to keep after this commit.
        local_ranks: This host's ranks, which assemble columns into whole rows in shared memory.
        may_share: Whether this rank has the memory to assemble columns.
        local: What the hosts' leaders share if each host has its own folder. None for a shared folder.
        earlier: Earlier attempts, as (iteration, name), which may have left a partial folder or messages. Once this
            attempt is committed, `run` removes them, with each rank removing its own messages: by then every rank has
            finished or aborted the earlier attempts.
        plans: Earlier attempts' plans.

    Attributes:
        job: This save on the worker.
        hooks: Optimizer hooks, which delay the next steps.
        start: When the previous save had ended, by `time.perf_counter`.
        waited_s: Seconds the call waited for the previous save.
        blocked_s: Seconds the call took afterwards, without later waits in the snapshot.
        committed_at: When the commit ended, by `time.perf_counter`. Set by `run`.
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
    local_ranks: LocalRanks
    may_share: bool = False
    local: LocalSaves | None = None
    earlier: Sequence[tuple[int, str]] = ()
    plans: KnownPlans = field(default_factory=KnownPlans)
    job: Job = field(init=False)
    hooks: list[torch.utils.hooks.RemovableHandle] = field(init=False, default_factory=list)
    start: float = field(init=False, default=0.0)
    waited_s: float = field(init=False, default=0.0)
    blocked_s: float = field(init=False, default=0.0)
    committed_at: float | None = field(init=False, default=None)
    _is_durable: bool = field(init=False, default=False)
    _view: int = field(init=False, default=0)

    @property
    def is_over(self) -> bool:
        """Return whether the save has ended or was aborted."""
        return self.job.is_done or self.snapshot.is_aborted

    @property
    def written_bytes(self) -> int:
        return sum(piece.hi - piece.lo for piece in self.plan.pieces)

    def report(self, error: TrainerError | None) -> SaveReport:
        """Return the report on this save after its end. Main thread."""
        return SaveReport(
            self.attempt.iteration,
            self.attempt.target,
            written_bytes=self.written_bytes,
            seconds=(self.committed_at or time.perf_counter()) - self.start,
            blocked_s=self.blocked_s + self.snapshot.blocked_s,
            waited_s=self.waited_s,
            copied_bytes=self.snapshot.copied_bytes,
            error=error,
        )

    def run(self) -> None:
        """Write and commit the checkpoint.

        Raises:
            TrainerError: The attempt did not become a checkpoint. Every rank raises. A leader raises LockError if
                another job has taken over the folder.
        """
        attempt, local = self.attempt, self.local
        arguments = (self.channel, attempt, self.shared, self, self.plans)
        commit = TwoPhaseCommit(*arguments) if local is None else HostsCommit(*arguments, local=local)
        try:
            commit.run()
            self.committed_at = time.perf_counter()
        except BaseException as error:
            self.local_ranks.drop()
            if self.channel.coordinates or self.shared.current.outcome is Outcome.FAILED:
                self._remove(attempt.partial)  # without a common folder, any rank may have written its own
            if isinstance(error, TrainerError) and self.lock is not None:
                self.lock.refuse_if_taken()  # the successor swept our files: do not blame the disk
            raise
        finally:
            self.snapshot.close()  # even if nothing was written, so that no step waits
            self._remove_earlier()
        if self._is_durable:  # only on leaders
            for note in self.contents.notes:
                note()
            pinned = {attempt.iteration, *(() if local is None else local.copying.pinned)}
            expired, _ = decide_expired(attempt.folder, self.retention, pinned=pinned)
            delete(attempt.folder, expired, attempt=attempt.name, lock=self.lock)
            # A host's memory or small disk holds only what a restart needs.
            for path in () if local is None else attempt.folder.superseded():
                if not is_held(path):
                    self._remove(path)

    def table(self) -> bytes:
        """Encode the table of pieces written by this rank."""
        return encode(self.plan.pieces, self.plan.layout)

    def view(self) -> int:
        """Return the checkpoint folder's identity on this host, before anything is written."""
        self._view = view_of(self.attempt.folder, leader=self.channel.coordinator)
        return self._view

    def begin(self) -> None:
        """Fail if there is no room for the checkpoint."""
        parts = len(self.attempt.hosts.leaders)
        require_room(self.attempt, self.contents.documents, self.retention, parts=parts, lock=self.lock)

    def write(self) -> Written:
        """Write this rank's part durably, and leave a sign file there for the leader to see.

        The host's other ranks wait in `join`, so nothing before it may hang.
        """
        attempt, snapshot = self.attempt, self.snapshot
        try:
            may_share = self.may_share and not snapshot.is_aborted
            sharing = self.local_ranks.join(attempt, self.plan.columns, may_share=may_share)
            if self._leads and not self.channel.coordinates:
                self.begin()
            writer = Writer(
                attempt.partial,
                attempt.folder.files,
                attempt.layout,
                snapshot,
                progress=ProgressLine(f"saving iteration {attempt.iteration}", self.written_bytes).add,
                leads=self._leads,
                is_sparse=self.local is not None,
                sharing=sharing,
            )
            result = writer.write(self.plan)
            snapshot.check()
        finally:
            snapshot.close()
        if not self._leads:
            require_view(attempt.folder, self._view, leader=self.channel.coordinator)
            if self.local is None:  # otherwise the opening has compared the host's views
                leave_sign(attempt.partial, self._view, attempt.folder.files)
        return result

    def json_files(self, tensors: Mapping[str, TensorEntry]) -> dict[str, bytes]:
        """Return the checkpoint's JSON files."""
        return finish.json_files(
            self.attempt, tensors, documents=self.contents.documents, aliases=self.contents.aliases
        )

    def prepare(self, files: Mapping[str, bytes], views: Mapping[int, int]) -> None:
        """Make all files in this host's folder durable, once every view's sign file is there."""
        folder, partial = self.attempt.folder, self.attempt.partial
        try:
            folder.files.make_folder(partial)
            require_signs(partial, views, folder, leader=self.channel.rank)
        except OSError as error:
            total_bytes = self.attempt.layout.total_bytes
            raise writing_failed(partial, error, folder.files, root=folder.root, total_bytes=total_bytes) from error
        finish.prepare(self.attempt, files, lock=self.lock, beside=self.contents.syncs)

    def rename(self) -> None:
        """Rename this host's partial folder to the checkpoint's name."""
        self._is_durable = finish.rename(self.attempt)

    @property
    def _leads(self) -> bool:
        """Return whether this rank is the leader, which alone changes names in its host's folder."""
        return self.channel.rank in self.attempt.hosts.leaders

    def _remove_earlier(self) -> None:
        """Remove what earlier attempts left: folders on leaders, and this rank's messages.

        A leader other than rank 0 removes folders only after a commit: a folder in doubt may be the newest checkpoint.
        """
        is_committed = self.shared.current.made_checkpoint
        if self._leads and (self.channel.coordinates or is_committed):
            for iteration, name in self.earlier:
                self._remove(self.attempt.folder.partial(iteration, name))
        if not is_committed:
            return
        try:
            if self.channel.world_size > 1:
                messages.delete_reports(self.channel, self.attempt)
                for _, name in self.earlier:
                    messages.delete_messages(self.channel, name)
            self.earlier = ()
        except LaunchError as error:
            _log.error("messages of earlier saves stay in the store: %s", error)

    def _remove(self, path: Path) -> None:
        try:
            self.attempt.folder.files.remove_tree(path)
        except OSError as error:
            if self._leads:
                _log.error("%s could not be removed, the next start sweeps it: %s", path, error)


def stalled_error(attempt: Attempt) -> CheckpointError:
    """Return the error for a save aborted while live memory had to stay unchanged."""
    return CheckpointError(
        "A save was aborted: the disk stalled, or an exception interrupted the copying",
        where=attempt.target,
        expected="a chunk written at least every stall_timeout_s",
        fix="Training continues and committed checkpoints are untouched. Check the file system.",
    )


def no_memory_error(attempt: Attempt, error: torch.OutOfMemoryError) -> CheckpointError:
    """Return the error for a save without enough device memory for its copies."""
    return CheckpointError(
        "A save ran out of device memory for copies of tensors that may change at any time",
        where=attempt.target,
        found=str(error).splitlines()[0],
        fix="Training continues and committed checkpoints are untouched. Use a smaller micro-batch to free memory.",
    )


def in_doubt_error(attempt: Attempt) -> CheckpointError:
    """Return the error for a save in doubt: this rank stops waiting, but the save may still be committed."""
    return CheckpointError(
        "A save did not end in time and may still be committed",
        where=attempt.target,
        expected="an end within commit_timeout_s",
        fix="The disk or another rank hangs. The next save checks whether this save was committed.",
    )
