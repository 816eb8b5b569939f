"""Saves the state of a run while it goes on, one save at a time. What a save does is told in `save_job.py`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.checkpoint.commit import protocol as commit
from trainer.checkpoint.commit.channel import StoreChannel
from trainer.checkpoint.commit.commit_state import Outcome
from trainer.checkpoint.commit.protocol import Attempt, SharedCommitState
from trainer.checkpoint.format.layout import TensorKind
from trainer.checkpoint.policy import SavePolicy, SaveReport
from trainer.checkpoint.saving.column_sharing import LocalRanks
from trainer.checkpoint.saving.plan import Plan, make_plan
from trainer.checkpoint.saving.replica_digests import ReplicaDigests
from trainer.checkpoint.saving.save_job import InDoubt, SaveJob
from trainer.checkpoint.saving.snapshot import Snapshot
from trainer.checkpoint.storage.folder import CheckpointFolder
from trainer.checkpoint.storage.lock import FolderLock
from trainer.checkpoint.storage.worker import Job, Worker
from trainer.checkpoint.tensors.arena import Arena
from trainer.checkpoint.tensors.live import Contents
from trainer.checkpoint.tensors.memory import Memory
from trainer.errors import CheckpointError, TrainerError

_log = logging.getLogger(__name__)

# The share of a save's time for which the background thread waits for a message: it knows whose it is, the main thread,
# which waits for the rest too, does not.
_PATIENCE = 0.8


@dataclass(slots=True)
class _Started:
    """A save_job with the job that runs it and what is counted on the main thread."""

    save_job: SaveJob
    job: Job
    hooks: list[torch.utils.hooks.RemovableHandle]
    start: float
    waited_s: float
    blocked_s: float

    @property
    def is_over(self) -> bool:
        """Return whether there is nothing to wait for."""
        return self.job.is_done or self.save_job.snapshot.is_given_up


class Saver:
    """The saves of one run on one rank. All ranks make the same calls in the same order, on the main thread.

    Args:
        nonce: a name of this run of the program, equal on all ranks; attempts are named after it.
        local_ranks: the ranks on this host, this one among them; none or one where nothing is known of the others.
    """

    def __init__(
        self,
        policy: SavePolicy,
        folder: CheckpointFolder,
        channel: StoreChannel,
        *,
        nonce: str,
        local_ranks: Sequence[int],
    ) -> None:
        self._policy, self._folder, self._channel, self._nonce = policy, folder, channel, nonce
        self._worker = Worker("checkpoint")
        self._worker_channel = channel.clone(_PATIENCE * policy.commit_timeout_s)
        self._local_ranks = LocalRanks(self._worker_channel, local_ranks)
        self._attempts = 0
        self._stale: list[str] = []  # keys of notices about attempts that failed, which may hang
        self._started: _Started | None = None
        self._stuck: Job | None = None
        self._reports: list[SaveReport] = []
        self._leftovers: list[Path] = []  # of attempts that were given up
        self._in_doubt: list[InDoubt] = []  # given up when they may still have been committed
        self._plan: Plan | None = None
        self._arena = Arena(0, is_pinned=False)
        self._is_arena_settled = False  # for that plan
        self._blocked_s = 0.0
        self.last_error: TrainerError | None = None  # of the save that ended last
        self.failed_saves = 0  # in a row
        self._present: dict[int, bool] = {}  # iterations known to be there -> with optimizer state
        self._pinned: set[int] = set()  # iterations that retention leaves alone

    def meet(self) -> None:
        """Find out who is on this host. Main thread, all ranks, once."""
        self._local_ranks.meet(self._channel, f"hosts/{self._nonce}")

    def part(self) -> None:
        """Take down what `meet` has said, when all ranks are through with it."""
        self._local_ranks.part(self._channel)

    def save(self, iteration: int, contents: Contents, lock: FolderLock | None) -> SaveReport | None:
        """Save `contents` as `iteration`, after the save that is under way; see `Checkpointer.save`."""
        self._attempts += 1
        asked = time.perf_counter()
        self.wait()
        self._settle()
        start = time.perf_counter()
        has_optimizer = any(spec.kind is TensorKind.OPTIMIZER for spec in contents.specs)
        name = f"{self._nonce}-{self._attempts}"
        if iteration in self._present and self._present[iteration] >= has_optimizer:
            _log.info("iteration %d is saved already, nothing to do", iteration)
            self._local_ranks.refuse(self._channel, name)  # another, which gave that save up too early, may try again
            if self._channel.rank == 0:
                commit.already_committed(self._channel, name, iteration)
                self._stale += commit.keys_of(name, 0)
                self._leftovers.append(self._folder.partial(iteration, name))
            return None
        if self._plan is None or not self._plan.suits(contents):
            self._plan = self._make_plan(contents)
        attempt = Attempt(iteration, name, self._folder, self._plan.layout)
        if self._stuck is not None and not self._stuck.is_done:
            error = _hangs(attempt)
            self._abort(attempt, error, self._new_shared_state())
            self._stale += commit.keys_of(name, self._channel.rank)
            self._leave_over(attempt)
            self._ended(attempt, error)
            self._reports.append(_untried(attempt, error))
        else:
            self._settle_arena(self._plan)
            self._start(self._prepare(attempt, contents, self._plan, lock), start, waited_s=start - asked)
        self._blocked_s += time.perf_counter() - asked
        return None if self._is_async else self._reports.pop()

    def reports(self) -> list[SaveReport]:
        """Return the reports of background saves that have ended and were not returned yet; does not wait."""
        if self._started is not None and self._started.is_over:
            self.wait()
        reports, self._reports = self._reports, []
        return reports

    def wait(self) -> None:
        """Wait for the save that is under way, unless it was given up, and take its outcome."""
        if self._started is None:
            return
        started, self._started = self._started, None
        save_job = started.save_job
        mine = commit.keys_of(save_job.attempt.name, self._channel.rank)
        self._stale += [*save_job.stale, *mine]
        error: TrainerError | None = None
        try:
            if save_job.snapshot.is_given_up and not started.job.is_done:
                raise _hangs(save_job.attempt)
            started.job.wait(self._policy.commit_timeout_s)
            may_be_already_committed = bool(self._in_doubt)  # then rank 0 has not collected its report
            self._settle()
            self._in_doubt.clear()  # rank 0 makes one attempt after the other: those before this one are over
            self._note(save_job)
            self._stale = [*save_job.stale, *(mine if may_be_already_committed else ())]
        except TrainerError as failure:
            error = failure
            if not started.job.is_done and not save_job.snapshot.is_given_up:
                save_job.snapshot.give_up()
                if not self._abort(save_job.attempt, failure, save_job.shared):
                    error = _in_doubt_error(save_job.attempt)
            if save_job.shared.current.outcome is not Outcome.FAILED:
                self._in_doubt.append(save_job.in_doubt)
            self._leave_over(save_job.attempt)
        finally:
            if not started.job.is_done:  # it may still read live memory, which is free to change from here on
                save_job.snapshot.give_up()
                self._stuck = started.job
            for hook in started.hooks:
                hook.remove()
        if not self._is_async:
            started.blocked_s = time.perf_counter() - started.start
        self._ended(save_job.attempt, error)
        self._reports.append(_report(started, error))

    def loaded(self, path: Path, iteration: int, *, has_optimizer: bool) -> None:
        """Know of a checkpoint that this process has loaded: it stays, and need not be saved again."""
        own = self._folder.iteration(iteration)
        if not own.is_symlink() and path.resolve() == own.resolve():
            self._present[iteration] = has_optimizer
            self._pinned.add(iteration)

    def rewound(self, iteration: int) -> None:
        """Forget checkpoints newer than `iteration`, which are out of the way."""
        self._present = {found: has for found, has in self._present.items() if found <= iteration}
        self._in_doubt = [found for found in self._in_doubt if found.attempt.iteration <= iteration]

    @property
    def pinned(self) -> frozenset[int]:
        """Return the iterations that retention leaves alone: those that this process has loaded."""
        return frozenset(self._pinned)

    @property
    def is_saving(self) -> bool:
        """Return whether a save is under way."""
        return self._started is not None and not self._started.job.is_done

    def take_blocked_s(self) -> float:
        """Return for how long saving kept the main thread since the last call."""
        blocked_s, self._blocked_s = self._blocked_s, 0.0
        return blocked_s

    def drain(self, timeout_s: float) -> None:
        """Give the background thread a while to end what it does, even for a save that was given up."""
        job = self._stuck if self._started is None else self._started.job
        if job is not None:
            with contextlib.suppress(TrainerError):
                job.wait(timeout_s)

    def close(self) -> None:
        """Wait for the save that is under way, and end the background thread."""
        self.wait()
        hangs = self._stuck is not None and not self._stuck.is_done
        self._worker.close(0.0 if hangs else self._policy.commit_timeout_s)
        if not hangs:
            self._local_ranks.drop()
            self._arena.close()

    @property
    def _is_async(self) -> bool:
        return self._policy.async_save

    def _start(self, save_job: SaveJob, start: float, *, waited_s: float) -> None:
        self._stuck = None
        hooks = []
        if self._is_async:
            hooks = [self._hold_back(optimizer, save_job) for optimizer in save_job.contents.optimizers]
        self._started = _Started(save_job, self._worker.submit(save_job.run), hooks, start, waited_s, 0.0)
        if not self._is_async:
            self.wait()
        else:
            self._started.blocked_s = time.perf_counter() - start

    def _note(self, save_job: SaveJob | InDoubt) -> None:
        """Know what is there, and what no longer is, after a save that was committed."""
        self._present = {found: has for found, has in self._present.items() if found not in save_job.expired}
        self._present[save_job.attempt.iteration] = save_job.has_optimizer

    def _settle(self) -> None:
        """Know of saves that were given up here and committed all the same."""
        in_doubt, self._in_doubt = self._in_doubt, []
        for found in in_doubt:
            if found.look_again():
                _log.info("iteration %d, given up on rank %d, is there", found.attempt.iteration, self._channel.rank)
                self._note(found)
            elif found.shared.current.outcome is not Outcome.FAILED:
                self._in_doubt.append(found)

    def _new_shared_state(self) -> SharedCommitState:
        return SharedCommitState(self._channel.rank, self._channel.world_size)

    def _abort(self, attempt: Attempt, error: TrainerError, shared: SharedCommitState) -> bool:
        """Fail an attempt in the place of the background thread, which hangs; return whether that is in time."""
        self._local_ranks.refuse(self._channel, attempt.name)
        return commit.abort(self._channel, attempt, error, shared)

    def _leave_over(self, attempt: Attempt) -> None:
        """Let the next save remove what a slow rank may still have made of a failed attempt."""
        self._leftovers.append(attempt.folder.partial(attempt.iteration, attempt.name))

    def _ended(self, attempt: Attempt, error: TrainerError | None) -> None:
        if error is not None:
            error.__traceback__ = None  # its frames hold the save, and the error is kept
        self.last_error = error
        self.failed_saves = 0 if error is None else self.failed_saves + 1
        if error is not None and self._channel.rank == 0:
            _log.error("iteration %d was not saved: %s", attempt.iteration, error)

    def _make_plan(self, contents: Contents) -> Plan:
        """Plan the saves of these tensors."""
        self._is_arena_settled = False
        return make_plan(
            contents, rank=self._channel.rank, file_bytes=self._policy.file_bytes, holds_steps=self._is_async
        )

    def _settle_arena(self, made: Plan) -> None:
        """Have an arena that suits a plan; an inline save needs none. Not while a thread that hangs may use the old."""
        if self._is_arena_settled:
            return
        self._is_arena_settled = True
        limit = self._policy.staging_bytes
        wanted = made.staging_bytes if limit is None else min(limit, made.staging_bytes)
        if self._is_async and wanted > self._arena.total_bytes:
            self._replace_arena(wanted, is_pinned=made.sources.is_on_device)

    def _replace_arena(self, wanted: int, *, is_pinned: bool) -> None:
        """Have a larger arena; where there is no memory for it, steps wait for the disk instead."""
        try:
            larger = Arena(wanted, is_pinned=is_pinned)
        except (CheckpointError, OSError) as error:
            _log.error("no staging memory of %d bytes, steps will wait for the disk: %s", wanted, error)
            return
        self._arena.close()
        self._arena = larger
        self._worker.submit(larger.touch)

    def _prepare(self, attempt: Attempt, contents: Contents, made: Plan, lock: FolderLock | None) -> SaveJob:
        leftovers, self._leftovers = self._leftovers, []
        stale, self._stale = self._stale, []
        memory = made.sources.begin()
        snapshot = Snapshot(memory, made.order, arena=self._arena, stall_timeout_s=self._policy.stall_timeout_s)
        return SaveJob(
            attempt=attempt,
            contents=contents,
            plan=made,
            snapshot=snapshot,
            replicas=self._replicas(made, memory),
            channel=self._worker_channel,
            shared=self._new_shared_state(),
            lock=lock,
            retention=self._policy.retention,
            present=frozenset(self._present),
            pinned=self.pinned,
            local_ranks=self._local_ranks,
            may_share=self._may_share(made),
            leftovers=leftovers,
            stale=stale,
        )

    def _replicas(self, made: Plan, memory: Mapping[str, Memory]) -> ReplicaDigests:
        """Return the digests of what other ranks hold too, of every save or of some."""
        interval = self._policy.check_replicas
        if not interval or self._attempts % interval:
            return ReplicaDigests({}, [], {}, {})
        watched = made.watched
        return ReplicaDigests(made.shared, made.pieces, {**memory, **watched.steady}, watched.changing())

    def _may_share(self, made: Plan) -> bool:
        """Return whether there may be a second copy of the columns, beside that of the arena."""
        limit = self._policy.staging_bytes
        return limit is None or sum(piece.hi - piece.lo for piece in made.columns) + self._arena.total_bytes <= limit

    def _hold_back(self, optimizer: torch.optim.Optimizer, save_job: SaveJob) -> torch.utils.hooks.RemovableHandle:
        """Let the optimizer's next step begin only when live memory may change."""
        snapshot = save_job.snapshot

        def release(*_: object) -> None:
            blocked_s, was_given_up = save_job.blocked_s, snapshot.is_given_up
            save_job.release()
            self._blocked_s += save_job.blocked_s - blocked_s
            if snapshot.is_given_up and not was_given_up:
                self._abort(save_job.attempt, _hangs(save_job.attempt), save_job.shared)

        return optimizer.register_step_pre_hook(release)


def _report(started: _Started, error: TrainerError | None) -> SaveReport:
    save_job = started.save_job
    attempt, snapshot = save_job.attempt, save_job.snapshot
    end = time.perf_counter() if save_job.committed_at is None else save_job.committed_at
    return SaveReport(
        attempt.iteration,
        attempt.folder.iteration(attempt.iteration),
        written_bytes=save_job.written_bytes,
        seconds=end - started.start,
        blocked_s=started.blocked_s + save_job.blocked_s,
        waited_s=started.waited_s,
        copied_bytes=snapshot.copied_bytes,
        error=error,
    )


def _untried(attempt: Attempt, error: TrainerError) -> SaveReport:
    return SaveReport(attempt.iteration, attempt.folder.iteration(attempt.iteration), 0, 0.0, error=error)


def _hangs(attempt: Attempt) -> CheckpointError:
    return CheckpointError(
        "A save was given up: the disk has written nothing for a while",
        where=attempt.folder.root,
        expected="a chunk within the time in which a training step may wait for it",
        fix="Training goes on and committed checkpoints are untouched; look at the file system.",
    )


def _in_doubt_error(attempt: Attempt) -> CheckpointError:
    return CheckpointError(
        "A save did not end in time, and may still be committed",
        where=attempt.folder.iteration(attempt.iteration),
        expected="an end within checkpoint.commit_timeout_s",
        fix="The disk or a peer hangs; the next save looks for it.",
    )
