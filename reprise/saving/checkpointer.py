"""Saves the state of a run while it trains, one save at a time. `saving/save_job.py` is one save from start to end."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import torch

from reprise.commit import messages
from reprise.commit.attempt import Attempt, AttemptNames, Hosts, SharedCommitState
from reprise.commit.commit_state import Outcome
from reprise.commit.hosts_commit import LocalSaves
from reprise.commit.joint_plan import KnownPlans
from reprise.commit.replicas import ReplicaDigests
from reprise.errors import TrainerError
from reprise.format.layout import Layout
from reprise.loading.restorer import Restored
from reprise.ranks.channel import StoreChannel
from reprise.ranks.error_message import as_problem
from reprise.saving.column_sharing import LocalRanks
from reprise.saving.owned_folder import OwnedFolder
from reprise.saving.plan import Plan
from reprise.saving.policy import SavePolicy, SaveReport, SaveResults
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
_NONE = (-1, False)  # in place of an iteration, and whether its checkpoint holds optimizer state
# torchrun kills 30 s after it has asked to end (torch/distributed/elastic/multiprocessing/api.py).
_LINGER_S = 20.0


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
        self._policy, self._channel, self._local = policy, channel, local
        self._owned = OwnedFolder(
            CheckpointFolder(policy.folder, files or FILE_SYSTEM, policy.terms), channel, nonce, hosts
        )
        self._worker = Worker("checkpoint")
        self._worker_channel = channel.clone(_PATIENCE * policy.commit_timeout_s)
        self._local_ranks = LocalRanks(self._worker_channel, local_ranks)
        self._staging = Staging(policy, channel.rank, self._worker)
        self._attempts, self._plans = AttemptNames(nonce), KnownPlans()
        self._newest = self._outdated = _NONE
        self._verified = -1  # a loaded checkpoint of which all digests were checked
        self._damaged = frozenset[int]()  # checkpoints that the load skipped
        # The attempts whose outcome this rank stopped awaiting, and whether they hold optimizer state.
        self._in_doubt = list[tuple[Attempt, bool]]()
        self._started: SaveJob | None = None
        self._stuck: Job | None = None  # of a save that was aborted while its thread hung
        self.results = SaveResults()

    def start(self) -> None:
        """Take the lock, sweep what dead attempts left, and make sure all ranks see the same folder.

        Raises:
            LockError: on every rank, if another job writes to the folder.
            CheckpointError: on every rank, if one of them does not see the folder of rank 0.
        """
        with self._local_ranks.met(self._channel, f"hosts/{self._attempts.nonce}"):
            self._owned.acquire()  # an agreement: all ranks have read the messages before they are deleted

    def take_folder(self) -> None:
        """Take the lock and sweep, in place of `start`, on a single rank of a shared folder.

        This rank tells the others. Whether they see the folder is left to each save, by a mark of its own.

        Raises:
            LockError: if another job writes to the folder.
            CheckpointError: if it cannot be written.
        """
        self._owned.take()

    def loaded(self, restored: Restored) -> None:
        """Take note of the checkpoint resumed from: a checkpoint of this run need not be saved again."""
        checkpoint, self._damaged = restored.checkpoint, restored.damaged
        folder = self._owned.folder.iteration(checkpoint.iteration)
        if not is_symlink(folder) and checkpoint.path.resolve() == folder.resolve():
            self.has_already(checkpoint.iteration, has_optimizer=checkpoint.has_optimizer)
            if restored.is_verified and self._local is None:
                self._verified = checkpoint.iteration

    def has_already(self, iteration: int, *, has_optimizer: bool) -> None:
        """Take note of the iteration resumed from: the folder has it, and it need not be saved again."""
        self._newest = iteration, has_optimizer

    def outdated(self, iteration: int) -> None:
        """Replace the checkpoint of `iteration`, whose record has become incomplete, at the next save of it.

        A checkpoint not loaded by this process is another: nothing shows it may go.
        """
        if self._newest[0] == iteration:
            self._newest, self._outdated = _NONE, self._newest

    def rewind(self, iteration: int, given_up: Collection[int] = ()) -> None:
        """Rename checkpoints overtaken by this run, newer than `iteration` or `given_up`, out of the way; then delete
        those given up by retention: on a full disk no save will make room for the next."""
        self.wait()
        if self._newest[0] > iteration:
            self._newest = _NONE
        self._in_doubt = [(attempt, full) for attempt, full in self._in_doubt if attempt.iteration <= iteration]
        retention, damaged, verified = self._policy.retention, self._damaged, self._verified
        self._owned.rewind(iteration, given_up, retention, damaged=damaged, verified=verified)

    def prepare(self, contents: Contents) -> None:
        """Allocate the staging memory of saves of `contents` in the background, after the save under way."""
        self.wait()
        self._staging.plan(contents)
        self._staging.populate()

    def save(self, iteration: int, contents: Contents, *, again: bool = False) -> SaveReport | None:
        """Save `contents` as `iteration`, unless it is the newest saved or loaded by this process, or `again`.

        An older iteration is saved again; its present folder is kept as superseded.

        A background save returns while it is written, after waiting for the save before it: `contents.optimizers` are
        held back at their next step until the memory changed by the step is written or copied; by the policy
        `copies_at_call`, all memory is copied before this returns. A failed save is logged and reported, never raised:
        training goes on and committed checkpoints are untouched. Only an error other than a TrainerError, such as a
        defect, is raised, on its rank; the others report it.

        Returns:
            The report of an inline save; None if there was nothing to do, or the save goes on in the background.
        """
        called, hosts = time.perf_counter(), self._owned.hosts
        shared = SharedCommitState(self._channel.rank, self._channel.ranks, hosts.leaders)
        attempt = Attempt(iteration, self._attempts.name, self._owned.folder, Layout((), {}), hosts)
        try:
            self._attempts.begin()  # all ranks count alike, wherever one of them fails
            self.wait()
            start = time.perf_counter()
            has_optimizer = contents.has_optimizer
            if not again and self._has(iteration, with_optimizer=has_optimizer):
                _log.info("iteration %d is saved already, nothing to do", iteration)
                if self._channel.coordinates:
                    messages.already_committed(self._channel, attempt.name, iteration)
                self._keep(attempt)
                return None
            if self._stuck is not None and not self._stuck.is_done:  # its thread may use the arena
                raise stalled(attempt)
            self._stuck = None
            plan = self._staging.plan(contents)
            # An outdated checkpoint gives way to a save with everything in it.
            replaces = self._outdated[0] == iteration and has_optimizer >= self._outdated[1]
            attempt = replace(attempt, layout=plan.layout, replaces=replaces)
            self._start(self._new_job(attempt, contents, plan, shared), called, start)
            if not self._policy.async_save:
                self.wait()
        except BaseException as error:
            problem = no_memory(attempt, error) if isinstance(error, torch.OutOfMemoryError) else as_problem(error)
            messages.abort(self._channel, attempt, problem, shared)
            self._keep(attempt)
            if self._started is not None and self._started.attempt.name == attempt.name:
                self._let_go(self._started)
                self.drain(_LINGER_S)  # what it has written is removed, and the next save finds an idle thread
            if not isinstance(error, TrainerError | torch.OutOfMemoryError):
                raise
            self._ended(SaveReport(iteration, attempt.target, 0, 0.0, error=problem))
        self.results.blocked_s += time.perf_counter() - called
        return None if self._policy.async_save else self.results.reports.pop()

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
        save_job = self._started
        if save_job is None:
            return
        attempt, snapshot, job = save_job.attempt, save_job.snapshot, save_job.job
        error, goes_on = None, False
        try:
            if snapshot.is_aborted and not job.is_done:
                raise stalled(attempt)
            job.wait(self._policy.commit_timeout_s, where=attempt.target)
            self._newest = attempt.iteration, save_job.contents.has_optimizer
            self._in_doubt.clear()  # rank 0 makes its attempts in sequence, so all before it are decided
        except TrainerError as failure:
            error = failure
            if not job.is_done and not snapshot.is_aborted:
                snapshot.abort()
                if not messages.abort(self._channel, attempt, failure, save_job.shared):
                    error = in_doubt_error(attempt)
            if save_job.shared.current.outcome is not Outcome.FAILED:
                self._in_doubt.append((attempt, save_job.contents.has_optimizer))
        except BaseException as interrupt:
            goes_on = self._policy.async_save and interrupt is not job.error
            raise
        finally:
            if not goes_on:
                self._let_go(save_job)
        if not self._policy.async_save:
            save_job.blocked_s = time.perf_counter() - save_job.start
        self._ended(save_job.report(error))

    def _has(self, iteration: int, *, with_optimizer: bool) -> bool:
        """Return whether `iteration` is saved already, with its optimizer state if asked for.

        Only the newest saved or loaded is asked about: a run ends with a save of it. An older iteration is saved again,
        whether retention has deleted it or not. An attempt in doubt counts if it was committed all the same.
        """
        newest, is_full = self._newest
        return (newest == iteration and is_full >= with_optimizer) or any(
            attempt.iteration == iteration and full >= with_optimizer and messages.is_committed(attempt)
            for attempt, full in self._in_doubt
        )

    def _let_go(self, save_job: SaveJob) -> None:
        """Release live memory, as nothing waits for this save any more."""
        self._started = None
        if not save_job.job.is_done:  # it may still read live memory
            save_job.snapshot.abort()
            self._stuck = save_job.job
        for hook in save_job.hooks:
            hook.remove()
        self._attempts.earlier += save_job.earlier
        # Of a committed attempt, only rank 0 has a message left: its decision.
        if self._channel.coordinates or not save_job.shared.current.made_checkpoint:
            self._keep(save_job.attempt)

    @property
    def is_saving(self) -> bool:
        """Return whether a background save is under way."""
        return self._started is not None and not self._started.job.is_done

    @property
    def landing(self) -> Landing | None:
        """Return the last save while its outcome is not taken."""
        if (save_job := self._started) is None:
            return None
        return Landing(save_job.attempt.iteration, save_job.job, self._policy.commit_timeout_s)

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
        """Release the lock: this process is about to end with an error. A save under way, which is good, may land."""
        try:
            self.drain(_LINGER_S)
            if (landing := self.landing) is not None and self.is_saving:
                landing.give_up()
            else:
                self.wait()  # its failure is logged
        finally:  # also after an interrupt, or a defect of the save
            self._worker.close(0.0)
            self._owned.release()

    def close(self) -> None:
        """Wait for the save under way, end the background thread and release the lock."""
        self.wait()
        is_stuck = self._stuck is not None and not self._stuck.is_done
        self._worker.close(0.0 if is_stuck else self._policy.commit_timeout_s)
        if not is_stuck:
            self._local_ranks.drop()
            self._staging.close()
            self._worker_channel.release()
        self.abandon()

    def __enter__(self) -> Self:
        """Return the checkpointer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the checkpointer; a second call completes one that an interrupt has ended."""
        self.close()

    def _start(self, save_job: SaveJob, called: float, start: float) -> None:
        """Hand a save to the background thread, and hold back the next steps of its optimizers until they may begin."""
        save_job.start, save_job.waited_s = start, start - called
        try:
            if self._policy.async_save:
                save_job.hooks += [self._hold_back(optimizer, save_job) for optimizer in save_job.contents.optimizers]
            save_job.job = self._worker.submit(save_job.run)
            self._started = save_job
            save_job.blocked_s = time.perf_counter() - start
            self._staging.populate()
            if self._policy.copies_at_call:
                self._release(save_job)
        except BaseException:
            save_job.snapshot.abort()  # the program may go on, and change what is not copied
            raise

    def _new_job(self, attempt: Attempt, contents: Contents, plan: Plan, shared: SharedCommitState) -> SaveJob:
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
            lock=self._owned.lock,
            retention=self._policy.retention,
            local_ranks=self._local_ranks,
            may_share=self._staging.may_share(plan),
            local=self._local,
            earlier=earlier,
            plans=self._plans,
        )

    def _keep(self, attempt: Attempt) -> None:
        """Note an attempt of which the next save removes what is left."""
        self._attempts.earlier.append((attempt.iteration, attempt.name))

    def _ended(self, report: SaveReport) -> None:
        self.results.add(report)
        if report.error is not None and self._channel.coordinates:
            _log.error("iteration %d was not saved: %s", report.iteration, report.error)

    def _hold_back(self, optimizer: torch.optim.Optimizer, save_job: SaveJob) -> torch.utils.hooks.RemovableHandle:
        """Delay the optimizer's next step until live memory may change."""

        def release(*_: object) -> None:
            blocked_s = save_job.snapshot.blocked_s
            self._release(save_job)
            self.results.blocked_s += save_job.snapshot.blocked_s - blocked_s

        return optimizer.register_step_pre_hook(release)

    def _release(self, save_job: SaveJob) -> None:
        """Copy the rest of live memory, which may change then; abort the save if the disk stalls meanwhile.

        An exception, such as KeyboardInterrupt, aborts the save: the program may go on, and change what is not copied.
        """
        snapshot, was_aborted = save_job.snapshot, save_job.snapshot.is_aborted
        try:
            snapshot.release()
        except BaseException:
            snapshot.abort()
            raise
        if snapshot.is_aborted and not was_aborted:
            messages.abort(self._channel, save_job.attempt, stalled(save_job.attempt), save_job.shared)
