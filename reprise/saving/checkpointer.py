"""Saves the state of a run while it trains, one save at a time. `saving/save_job.py` is one save from start to end."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import torch

from reprise.commit import messages
from reprise.commit.attempt import Attempt, AttemptNames, Hosts, SharedCommitState
from reprise.commit.commit_state import Outcome
from reprise.commit.hosts_commit import LocalSaves
from reprise.commit.joint_plan import KnownPlans
from reprise.commit.replicas import ReplicaDigests
from reprise.errors import CheckpointError, TrainerError
from reprise.format.layout import Layout, TensorKind
from reprise.loading.restorer import Restored
from reprise.ranks.channel import StoreChannel
from reprise.ranks.error_message import as_problem
from reprise.saving.column_sharing import LocalRanks
from reprise.saving.owned_folder import InDoubt, OwnedFolder, SavedIterations
from reprise.saving.plan import Plan
from reprise.saving.policy import SavePolicy, SaveReport
from reprise.saving.save_job import SaveJob, in_doubt_error, no_memory, stalled
from reprise.saving.snapshot import Staging
from reprise.storage.files import FILE_SYSTEM, Files
from reprise.storage.folder import CheckpointFolder
from reprise.storage.paths import is_symlink
from reprise.storage.worker import Job, Worker
from reprise.tensors.live import Contents

_log = logging.getLogger(__name__)

# The share of a save's time for which the background thread waits for a message: its error names the sender, that of
# the main thread, which waits for the rest too, does not.
_PATIENCE = 0.8
# torchrun kills 30 s after it has asked to end (torch/distributed/elastic/multiprocessing/api.py).
_LINGER_S = 20.0


@dataclass(slots=True)
class SaveResults:
    """The results of the saves of one rank.

    Args:
        reports: of background saves ended and not returned yet.
        blocked_s: for how long saving kept the main thread since `take_blocked_s`.
        last_error: why the last save to end became no checkpoint, or None if it did.
        failed_saves: how many saves in a row have failed.
    """

    reports: list[SaveReport] = field(default_factory=list)
    blocked_s: float = 0.0
    last_error: TrainerError | None = None
    failed_saves: int = 0

    def add(self, report: SaveReport) -> None:
        """Add the report of an ended save."""
        if report.error is not None:
            report.error.__traceback__ = None  # its frames hold the save, and the error is kept
        self.last_error = report.error
        self.failed_saves = 0 if report.error is None else self.failed_saves + 1
        self.reports.append(report)

    def take_blocked_s(self) -> float:
        """Return for how long saving kept the main thread since the last call."""
        blocked_s, self.blocked_s = self.blocked_s, 0.0
        return blocked_s


@dataclass(slots=True)
class _Started:
    """A save under way: its job on the worker, and its times on the main thread."""

    save_job: SaveJob
    job: Job
    hooks: list[torch.utils.hooks.RemovableHandle]
    start: float
    waited_s: float
    blocked_s: float

    @property
    def is_over(self) -> bool:
        """Return whether there is nothing to wait for."""
        return self.job.is_done or self.save_job.snapshot.is_aborted


@dataclass(frozen=True, slots=True)
class Landing:
    """A background save under way, for the end of a program that has dropped its saver."""

    iteration: int
    job: Job
    timeout_s: float

    @property
    def is_over(self) -> bool:
        """Return whether it has become a checkpoint."""
        return self.job.is_done and self.job.error is None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the save, after an error for a short time only, else raise why it became no checkpoint."""
        if error is None:
            self.job.wait(self.timeout_s)
        elif not self.job.ends(_LINGER_S):
            self.give_up()

    def give_up(self) -> None:
        """Log that nobody waits for the save any longer."""
        _log.error("iteration %d was not saved: its save did not end within %.0f s", self.iteration, _LINGER_S)


class Checkpointer:
    """The saves of one run, on one rank. All ranks make the same calls in the same order, on the main thread.

    Args:
        nonce: a name of this run of the program, equal on all ranks; attempts are named after it.
        local_ranks: the ranks on this host, this rank among them; where they are not known, columns are written by row.
        hosts: the hosts, each with a folder of its own under the policy's path; None for a folder of all hosts.
        local: what their leaders keep between saves.
    """

    def __init__(
        self,
        policy: SavePolicy,
        channel: StoreChannel,
        *,
        nonce: str,
        files: Files | None = None,
        local_ranks: Sequence[int] = (),
        hosts: Hosts | None = None,
        local: LocalSaves | None = None,
    ) -> None:
        self._policy, self._channel = policy, channel
        self._owned: OwnedFolder | None = None
        if policy.folder is not None:
            folder = CheckpointFolder(policy.folder, files or FILE_SYSTEM, policy.terms)
            self._owned = OwnedFolder(folder, channel, nonce, hosts)
        self._hosts, self._local = hosts or Hosts.of(channel.ranks), local
        self._worker = Worker("checkpoint")
        # A clone has a connection of its own, which a run that saves nothing does not need.
        self._worker_channel = channel if self._owned is None else channel.clone(_PATIENCE * policy.commit_timeout_s)
        # A run of one rank has nobody to share columns with.
        self._local_ranks = LocalRanks(self._worker_channel, local_ranks) if channel.world_size > 1 else None
        self._staging = Staging(policy, channel.rank, self._worker)
        self._attempts, self._plans = AttemptNames(nonce), KnownPlans()
        self._saved = SavedIterations()
        self._started: _Started | None = None
        self._stuck: Job | None = None  # of a save that was aborted while its thread hung
        self.results = SaveResults()

    def start(self) -> None:
        """Take the lock, sweep what dead attempts left, and make sure all ranks see the same folder.

        Raises:
            LockError: on every rank, if another job writes to the folder.
            CheckpointError: on every rank, if one of them does not see the folder of rank 0.
        """
        if self._owned is None:
            return
        hosts = f"hosts/{self._attempts.nonce}"
        if self._local_ranks is not None:
            self._local_ranks.meet(self._channel, hosts)
        self._owned.acquire()  # an agreement: all ranks have read the messages of `meet`
        if self._local_ranks is not None:
            self._local_ranks.part(self._channel, hosts)
        self._owned.require_shared()

    def take_folder(self) -> None:
        """Take the lock and sweep, in place of `start`, on a single rank of a shared folder.

        This rank tells the others. Whether they see the folder is left to each save, by a mark of its own.

        Raises:
            LockError: if another job writes to the folder.
            CheckpointError: if it cannot be written.
        """
        assert self._owned is not None
        self._owned.take(marks=False)

    def loaded(self, restored: Restored) -> None:
        """Take note of the checkpoint resumed from: a checkpoint of this run need not be saved again."""
        if self._owned is None:
            return
        checkpoint, self._saved.damaged = restored.checkpoint, restored.damaged
        folder = self._owned.folder.iteration(checkpoint.iteration)
        if not is_symlink(folder) and checkpoint.path.resolve() == folder.resolve():
            is_verified = restored.is_verified and self._local is None
            self._saved.loaded(checkpoint.iteration, checkpoint.has_optimizer, is_verified=is_verified)

    def has_already(self, iteration: int, *, has_optimizer: bool) -> None:
        """Take note of the iteration resumed from: the folder has it, and it need not be saved again."""
        if self._owned is not None:
            self._saved.loaded(iteration, has_optimizer, is_verified=False)

    def outdated(self, iteration: int) -> None:
        """Let the next save of `iteration` replace its checkpoint, whose record has become incomplete."""
        self._saved.outdated(iteration)

    def rewind(self, iteration: int, given_up: Collection[int] = ()) -> None:
        """Rename checkpoints overtaken by this run, newer than `iteration` or `given_up`, out of the way; then delete
        those given up by retention: on a full disk no save will make room for the next."""
        self.wait()
        self._saved.rewound(iteration)
        if self._owned is not None:
            self._owned.rewind(iteration, given_up, self._policy.retention, self._saved)

    def is_due(self, iteration: int) -> bool:
        """Return whether the policy asks for a save after `iteration`."""
        interval, steps = self._policy.save_interval, self._policy.save_steps
        is_multiple = interval > 0 and iteration > 0 and iteration % interval == 0
        return self._owned is not None and (is_multiple or iteration in steps)

    def prepare(self, contents: Contents) -> None:
        """Allocate the staging memory of saves of `contents` in the background, after the save under way."""
        self.wait()
        self._staging.prepare(contents)

    def save(self, iteration: int, contents: Contents, *, again: bool = False) -> SaveReport | None:
        """Save `contents` as `iteration`, unless it is the newest saved or loaded by this process, or `again`.

        An older iteration is saved again; its present folder is kept as superseded.

        A background save returns while it is written, after waiting for the save before it: `contents.optimizers` are
        held back at their next step until the memory changed by the step is written or copied; by the policy
        `copies_at_call`, all memory is copied before this returns. A failed save is logged and reported, never raised:
        training goes on and committed checkpoints are untouched. Only an error other than a TrainerError, a defect or a
        lack of memory, is raised, on its rank; the others report it.

        Returns:
            The report of an inline save; None if there was nothing to do, or the save goes on in the background.
        """
        if self._owned is None:
            return None
        called = time.perf_counter()
        with self._aborting(iteration) as (name, shared):
            self.wait()
            self._saved.settle(self._channel.rank)
            start = time.perf_counter()
            has_optimizer = any(spec.kind is TensorKind.OPTIMIZER for spec in contents.specs)
            if not again and self._saved.has(iteration, with_optimizer=has_optimizer):
                _log.info("iteration %d is saved already, nothing to do", iteration)
                self._refuse_columns(name)  # a rank on which that save is in doubt may try again
                if self._channel.coordinates:
                    messages.already_committed(self._channel, name, iteration)
                self._keep([(iteration, name)])
                return None
            plan = self._staging.plan(contents)
            replaces = self._saved.gives_way(iteration, with_optimizer=has_optimizer)
            attempt = Attempt(iteration, name, self._owned.folder, plan.layout, self._hosts, replaces=replaces)
            if self._stuck is not None and not self._stuck.is_done:
                self._refuse(attempt, stalled(attempt), shared)
            else:
                self._stuck = None
                try:
                    self._start(self._new_job(self._owned, attempt, contents, plan, shared), called, start)
                except torch.OutOfMemoryError as error:  # what is copied on the device finds no room there
                    self._refuse(attempt, no_memory(attempt, error), shared)
                if not self._is_async:
                    self.wait()
            self.results.blocked_s += time.perf_counter() - called
            return None if self._is_async else self.results.reports.pop()

    def reports(self) -> list[SaveReport]:
        """Return the reports of background saves ended since the last call; does not wait."""
        if self._started is not None and self._started.is_over:
            self.wait()
        reports, self.results.reports = self.results.reports, []
        return reports

    def wait(self) -> None:
        """Wait for the save under way, unless it was aborted, and take its outcome.

        An exception in a wait for a background save, such as KeyboardInterrupt, leaves the save under way.
        """
        started = self._started
        if started is None:
            return
        save_job, error, goes_on = started.save_job, None, False
        attempt, snapshot = save_job.attempt, save_job.snapshot
        try:
            if snapshot.is_aborted and not started.job.is_done:
                raise stalled(attempt)
            started.job.wait(self._policy.commit_timeout_s, where=attempt.folder.iteration(attempt.iteration))
            self._saved.committed(attempt.iteration, has_optimizer=save_job.has_optimizer)
        except TrainerError as failure:
            error = failure
            if not started.job.is_done and not snapshot.is_aborted:
                snapshot.abort()
                if not self._abort(attempt, failure, save_job.shared):
                    error = in_doubt_error(attempt)
            if save_job.shared.current.outcome is not Outcome.FAILED:
                self._saved.in_doubt.append(InDoubt(attempt, save_job.shared, save_job.has_optimizer))
        except BaseException as interrupt:
            goes_on = self._is_async and interrupt is not started.job.error
            raise
        finally:
            if not goes_on:
                self._let_go(started)
        if not self._is_async:
            started.blocked_s = time.perf_counter() - started.start
        self._ended(_report(started, error))

    def _let_go(self, started: _Started) -> None:
        """Let live memory change, as nothing waits for this save any more."""
        save_job, self._started = started.save_job, None
        if not started.job.is_done:  # it may still read live memory
            save_job.snapshot.abort()
            self._stuck = started.job
        for hook in started.hooks:
            hook.remove()
        # Of a committed attempt, only rank 0 has a message left: its decision.
        is_tidy = save_job.shared.current.made_checkpoint and not self._channel.coordinates
        attempt = (save_job.attempt.iteration, save_job.attempt.name)
        self._keep([*save_job.earlier, *([] if is_tidy else [attempt])])

    @property
    def is_saving(self) -> bool:
        """Return whether a background save is under way."""
        return self._started is not None and not self._started.job.is_done

    @property
    def landing(self) -> Landing | None:
        """Return the last save while its outcome is not taken."""
        started = self._started
        if started is None:
            return None
        return Landing(started.save_job.attempt.iteration, started.job, self._policy.commit_timeout_s)

    @property
    def attempts(self) -> int:
        """Return the number of saves begun, which is equal on all ranks while they are in step."""
        return self._attempts.count

    def drain(self, timeout_s: float) -> None:
        """Wait until the background thread has nothing to do, not even for an aborted save, or for a while."""
        job = self._stuck if self._started is None else self._started.job
        if job is not None:
            job.ends(timeout_s)

    def abandon(self) -> None:
        """Let go of the lock: this process is about to end with an error. A save under way, which is good, may land."""
        try:
            self.drain(_LINGER_S)
            if (landing := self.landing) is not None and self.is_saving:
                landing.give_up()
            else:
                self.wait()  # its failure is logged
        finally:  # also after an interrupt, or a defect of the save
            self._worker.close(0.0)
            if self._owned is not None:
                self._owned.release()

    def close(self) -> None:
        """Wait for the save under way, end the background thread and let go of the lock."""
        self.wait()
        is_stuck = self._stuck is not None and not self._stuck.is_done
        self._worker.close(0.0 if is_stuck else self._policy.commit_timeout_s)
        if not is_stuck:
            if self._local_ranks is not None:
                self._local_ranks.drop()
            self._staging.close()
            self._worker_channel.release()
        self.abandon()

    def __enter__(self) -> Checkpointer:
        """Return the checkpointer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the checkpointer; a second call completes one that an interrupt has ended."""
        self.close()

    @property
    def _is_async(self) -> bool:
        return self._policy.async_save

    @contextlib.contextmanager
    def _aborting(self, iteration: int) -> Iterator[tuple[str, SharedCommitState]]:
        """Name an attempt, and abort it on every rank if the block raises on this rank.

        All ranks count alike: the block may raise on one rank alone.
        """
        assert self._owned is not None
        shared = SharedCommitState(self._channel.rank, self._channel.ranks, self._hosts.leaders)
        name = self._attempts.name
        try:
            self._attempts.begin()
            yield name, shared
        except BaseException as error:
            self._abort(Attempt(iteration, name, self._owned.folder, Layout((), {})), as_problem(error), shared)
            self._keep([(iteration, name)])
            started = self._started
            if started is not None and started.save_job.attempt.name == name:
                self._let_go(started)
                self.drain(_LINGER_S)  # what it has written is removed, and the next save finds an idle thread
            raise

    def _start(self, save_job: SaveJob, called: float, start: float) -> None:
        """Let the background thread run a save, and the next steps of its optimizers wait until they may begin."""
        optimizers = save_job.contents.optimizers if self._is_async else ()
        try:
            hooks = [self._hold_back(optimizer, save_job) for optimizer in optimizers]
            job = self._worker.submit(save_job.run)
            self._started = _Started(save_job, job, hooks, start, start - called, time.perf_counter() - start)
            self._staging.populate()
            if self._policy.copies_at_call:
                self._release(save_job)
        except BaseException:
            save_job.snapshot.abort()  # the program may go on, and change what is not copied
            raise

    def _new_job(
        self, owned: OwnedFolder, attempt: Attempt, contents: Contents, plan: Plan, shared: SharedCommitState
    ) -> SaveJob:
        interval = self._policy.check_replicas
        compares = interval > 0 and self._attempts.count % interval == 0
        replicas = ReplicaDigests(plan.saved if compares and self._channel.world_size > 1 else ())
        snapshot = self._staging.begin(plan)
        earlier, self._attempts.earlier = self._attempts.earlier, []
        return SaveJob(
            attempt=attempt,
            contents=contents,
            plan=plan,
            snapshot=snapshot,
            replicas=replicas,
            channel=self._worker_channel,
            shared=shared,
            lock=owned.lock,
            retention=self._policy.retention,
            local_ranks=self._local_ranks,
            may_share=self._staging.may_share(plan),
            local=self._local,
            earlier=earlier,
            plans=self._plans,
        )

    def _refuse(self, attempt: Attempt, error: CheckpointError, shared: SharedCommitState) -> None:
        """Fail an attempt at once, before anything of it is written."""
        self._abort(attempt, error, shared)
        self._keep([(attempt.iteration, attempt.name)])
        self._ended(SaveReport(attempt.iteration, attempt.folder.iteration(attempt.iteration), 0, 0.0, error=error))

    def _abort(self, attempt: Attempt, error: TrainerError, shared: SharedCommitState) -> bool:
        """Abort an attempt in the place of the background thread, which hangs; return whether the abort is in time."""
        self._refuse_columns(attempt.name)
        return messages.abort(self._channel, attempt, error, shared)

    def _refuse_columns(self, name: str) -> None:
        """Let no rank of the host wait for this rank's columns of attempt `name`."""
        if self._local_ranks is not None:
            self._local_ranks.refuse(self._channel, name)

    def _keep(self, attempts: Sequence[tuple[int, str]]) -> None:
        """Let the next save remove what is left of these attempts."""
        self._attempts.earlier += attempts

    def _ended(self, report: SaveReport) -> None:
        self.results.add(report)
        if report.error is not None and self._channel.coordinates:
            _log.error("iteration %d was not saved: %s", report.iteration, report.error)

    def _hold_back(self, optimizer: torch.optim.Optimizer, save_job: SaveJob) -> torch.utils.hooks.RemovableHandle:
        """Let the optimizer's next step begin only when live memory may change."""

        def release(*_: object) -> None:
            blocked_s = save_job.blocked_s
            self._release(save_job)
            self.results.blocked_s += save_job.blocked_s - blocked_s

        return optimizer.register_step_pre_hook(release)

    def _release(self, save_job: SaveJob) -> None:
        """Wait until live memory may change; abort the save if the disk stalls meanwhile."""
        was_aborted = save_job.snapshot.is_aborted
        save_job.release()
        if save_job.snapshot.is_aborted and not was_aborted:
            self._abort(save_job.attempt, stalled(save_job.attempt), save_job.shared)


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
