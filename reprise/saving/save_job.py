"""A save on the worker thread: write, vote, prepare, rename, broadcast, then delete expired checkpoints."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from reprise.commit.commit_state import Outcome
from reprise.commit.messages import Message
from reprise.commit.protocol import TwoPhaseCommit
from reprise.errors import CheckpointError, LaunchError, TrainerError
from reprise.saving.column_sharing import LocalRanks, Stripes
from reprise.saving.plan import Plan
from reprise.saving.policy import Retention, SaveReport
from reprise.saving.retention import decide_expired, delete, require_room
from reprise.saving.snapshot import Snapshot
from reprise.saving.writer import Writer
from reprise.storage.holds import is_held
from reprise.storage.paths import matching
from reprise.storage.shared_folder import seen_throughout
from reprise.storage.worker import Job

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class SaveJob(TwoPhaseCommit):
    """A rank's part in a save. Every rank calls `run` once, on its worker thread.

    Args:
        retention: Which checkpoints to keep after this commit.
        local_ranks: This host's ranks, which assemble columns into whole rows in shared memory.
        start: When the previous save had ended, by `time.perf_counter`.
        report: The report on this save, which it fills in.

    Attributes:
        job: This save on the worker.
        hooks: Optimizer hooks, which delay the next steps.
    """

    plan: Plan
    snapshot: Snapshot
    retention: Retention
    local_ranks: LocalRanks
    report: SaveReport
    start: float
    job: Job = field(init=False)
    hooks: list[torch.utils.hooks.RemovableHandle] = field(init=False, default_factory=list)

    def run(self) -> None:
        """Write and commit the checkpoint.

        Raises:
            TrainerError: The attempt did not become a checkpoint. Every rank raises. A leader raises LockError if
                another job has taken over the folder.
        """
        attempt, copying = self.attempt, self.copying
        try:
            self.commit()
            self.report.seconds = time.perf_counter() - self.start
        except BaseException as error:
            self.local_ranks.drop()
            if isinstance(error, TrainerError) and self.lock is not None:
                with suppress(OSError):
                    self.lock.check()  # a successor swept our files: do not blame the disk
            raise
        finally:
            self.snapshot.close()  # even if nothing was written, so that no step waits
            self._clean_up()
        if self.is_durable:  # only on leaders
            for note in self.contents.notes:
                note()
            pinned = {attempt.iteration, *(() if copying is None else copying.pinned)}
            expired = decide_expired(attempt.folder, self.retention, pinned=pinned)
            delete(attempt.folder, expired, attempt=attempt.name, lock=self.lock)
            # A host's memory or small disk holds only what a restart needs.
            for path in () if copying is None else attempt.folder.superseded():
                if not is_held(path):
                    self._remove(path)

    def begin(self) -> None:
        """Make the partial folder, or fail if there is no room for the checkpoint."""
        attempt, parts = self.attempt, len(self.attempt.hosts.leaders)
        require_room(attempt, self.contents.documents, self.retention, parts=parts, lock=self.lock)
        with attempt.writing():
            attempt.folder.files.make_folder(attempt.partial)

    def write(self) -> Message:
        """Write this rank's part durably. The host's other ranks wait in `join`, so nothing before it may hang."""
        attempt, snapshot, columns = self.attempt, self.snapshot, self.plan.columns
        stripes: Stripes = {}
        try:
            if self.local_ranks.ranks:
                may_share = snapshot.has_room(sum(piece.hi - piece.lo for piece in columns))
                stripes = self.local_ranks.join(self.shared, attempt.layout, columns, may_share=may_share)
            writer = Writer(
                attempt=attempt,
                plan=self.plan,
                snapshot=snapshot,
                leads=self.leads,
                is_sparse=self.copying is not None,
                stripes=stripes,
            )
            leader = attempt.hosts.ranks_with(self.channel.rank)[0]
            same_folder = seen_throughout(attempt.partial, attempt.folder, leader=leader)
            with nullcontext() if self.leads else same_folder:
                report = writer.write()
            snapshot.check()
        finally:
            snapshot.close()
        return report

    def _clean_up(self) -> None:
        """Remove what this run's attempts left: partial folders, and this rank's messages after a commit.

        A leader other than rank 0 removes folders only after a commit: a folder in doubt may be the newest checkpoint.
        """
        attempt, state = self.attempt, self.shared.current
        # Without a common folder, any rank may have written its own.
        remains = [attempt.partial] if state.outcome is Outcome.FAILED else []
        try:
            is_committed = state.outcome is Outcome.COMMITTED
            if self.leads and (self.channel.coordinates or is_committed):
                launch = attempt.name.rpartition("-")[0]
                remains = matching(attempt.folder.root, f".iter_*.{launch}-*.partial")
            for path in remains:
                self._remove(path)
            if is_committed:
                self.shared.delete_read()
        except (LaunchError, OSError) as error:
            _log.error("remains of earlier saves stay: %s", error)

    def _remove(self, path: Path) -> None:
        try:
            self.attempt.folder.files.remove(path)
        except OSError as error:
            if self.leads:
                _log.error("%s could not be removed, the next start sweeps it: %s", path, error)


def no_memory_error(where: Path, error: torch.OutOfMemoryError) -> CheckpointError:
    """Return the error for a save without enough device memory for its copies."""
    return CheckpointError(
        "A save ran out of device memory for copies of tensors that may change at any time",
        where=where,
        found=str(error).splitlines()[0],
        fix="Training continues and committed checkpoints are untouched. Use a smaller micro-batch to free memory.",
    )
