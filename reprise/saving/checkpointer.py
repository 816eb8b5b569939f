"""Saves a run's state while it trains, one save at a time. `saving/save_job.py` runs a single save."""

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
from reprise.saving.save_job import SaveJob, in_doubt_error, no_memory_error, stalled_error
from reprise.saving.snapshot import Staging
from reprise.storage.files import FILE_SYSTEM, Files
from reprise.storage.folder import CheckpointFolder
from reprise.storage.paths import is_symlink
from reprise.storage.worker import Job, Worker
from reprise.tensors.live import Contents

_log = logging.getLogger(__name__)

# The fraction of a save's timeout during which the background thread waits for a message. Its error names the silent
# rank. The main thread, which waits for the full timeout, cannot name it.
_PATIENCE = 0.8
_NONE = (-1, False)  # no iteration, and no optimizer state in its checkpoint
# torchrun sends SIGKILL 30 s after SIGTERM (torch/distributed/elastic/multiprocessing/api.py).
_LINGER_S = 20.0


@dataclass(frozen=True, slots=True)
class Landing:
    """A background save under way, which a program's end waits for even if the saver was dropped."""

    iteration: int
    job: Job
    timeout_s: float

    @property
    def is_over(self) -> bool:
        """Return whether the save has become a checkpoint."""
        return self.job.is_done and self.job.error is None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the save and raise its error. If the program failed, wait only briefly and raise nothing."""
        if error is None:
            self.job.wait(self.timeout_s)
        elif not self.job.ends(_LINGER_S):
            self.give_up()

    def give_up(self) -> None:
        """Log an error: the program no longer waits for the save."""
        _log.error("iteration %d was not saved: its save did not end within %.0f s", self.iteration, _LINGER_S)


class Checkpointer:
    """Saves a rank's share of a run's checkpoints. All ranks make the same calls in order, on the main thread.

    Args:
        nonce: This launch's random name, equal on all ranks. Attempts are named after it.
        local_ranks: This host's ranks, including this rank. If empty, columns are written row by row.
        hosts: The hosts, each with its own folder at the policy's path. None if all hosts share a folder.
        local: What the hosts' leaders keep between saves. None for a shared folder.
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
        self._verified = -1  # the loaded checkpoint, if all its digests were checked
        self._damaged = frozenset[int]()  # checkpoints skipped by the load
        # Attempts whose outcome this rank stopped waiting for, and whether they hold optimizer state.
        self._in_doubt = list[tuple[Attempt, bool]]()
        self._started: SaveJob | None = None
        self._stuck: Job | None = None  # an aborted save whose thread hung
        self.results = SaveResults()

    def start(self) -> None:
        """Take the lock, sweep up after dead attempts, and check whether all ranks see the same folder.

        Raises:
            LockError: Another job writes to the folder. Every rank raises.
            CheckpointError: The folder cannot be written, or some rank does not see its leader's folder. Every rank
                raises.
        """
        with self._local_ranks.check_same_host(self._channel, f"hosts/{self._attempts.nonce}"):
            self._owned.acquire()  # waits for all ranks, so they have read the messages before the block deletes them

    def take_folder(self) -> None:
        """Take the lock and sweep, on the coordinator alone, in place of `start` for a shared folder.

        The caller reports the outcome to the other ranks. Each save then checks whether they see the folder.

        Raises:
            LockError: Another job writes to the folder.
            CheckpointError: The folder cannot be written.
        """
        self._owned.take()

    def note_loaded(self, restored: Restored) -> None:
        """Note the loaded checkpoint. If it lies in this folder, it need not be saved again."""
        checkpoint, self._damaged = restored.checkpoint, restored.damaged
        folder = self._owned.folder.iteration(checkpoint.iteration)
        if not is_symlink(folder) and checkpoint.path.resolve() == folder.resolve():
            self.note_saved(checkpoint.iteration, has_optimizer=checkpoint.has_optimizer)
            if restored.is_verified and self._local is None:
                self._verified = checkpoint.iteration

    def note_saved(self, iteration: int, *, has_optimizer: bool) -> None:
        """Note an iteration already in the folder, which need not be saved again."""
        self._newest = iteration, has_optimizer

    def mark_outdated(self, iteration: int) -> None:
        """Mark the checkpoint at `iteration` as incomplete: the next save with this iteration replaces it.

        Only the newest checkpoint saved or loaded by this process is marked. Others must not be deleted.
        """
        if self._newest[0] == iteration:
            self._newest, self._outdated = _NONE, self._newest

    def rewind(self, iteration: int, given_up: Collection[int] = ()) -> None:
        """Move overtaken checkpoints (newer than `iteration`, or in `given_up`) aside, then apply retention.

        Retention runs here because on a full disk no save would complete and make room for the next.
        """
        self.wait()
        if self._newest[0] > iteration:
            self._newest = _NONE
        self._in_doubt = [(attempt, full) for attempt, full in self._in_doubt if attempt.iteration <= iteration]
        retention, damaged, verified = self._policy.retention, self._damaged, self._verified
        self._owned.rewind(iteration, given_up, retention, damaged=damaged, verified=verified)

    def prepare(self, contents: Contents) -> None:
        """Allocate staging memory for saving `contents`, after the save under way, and touch it in the background."""
        self.wait()
        self._staging.plan(contents)
        self._staging.populate()

    def save(self, iteration: int, contents: Contents, *, again: bool = False) -> SaveReport | None:
        """Save `contents` as `iteration`, unless this process saved or loaded that iteration last.

        An older iteration is saved again, and its present folder is renamed as superseded.

        A background save first waits for the previous save, then returns while the disk writes. The next step in
        `contents.optimizers` waits until the memory it changes is written or copied. Under the policy
        `copies_at_call`, all memory is copied before this call returns. A failed save is logged and reported, never
        raised: training continues and committed checkpoints are untouched. Only an unexpected error, neither a
        TrainerError nor out of device memory, is raised, on the failing rank; other ranks report it.

        Args:
            again: Save even if this process saved or loaded the iteration last.

        Returns:
            The inline save's report. None if nothing was to do, or if the save continues in the background.
        """
        called, hosts = time.perf_counter(), self._owned.hosts
        shared = SharedCommitState(self._channel.rank, self._channel.ranks, hosts.leaders)
        attempt = Attempt(iteration, self._attempts.name, self._owned.folder, Layout((), {}), hosts)
        try:
            self._attempts.begin()  # before anything may fail, so that all ranks have the same count
            self.wait()
            start = time.perf_counter()
            has_optimizer = contents.has_optimizer
            if not again and self._is_saved(iteration, with_optimizer=has_optimizer):
                _log.info("iteration %d is already saved, nothing to do", iteration)
                if self._channel.coordinates:
                    messages.already_committed(self._channel, attempt.name, iteration)
                self._note_earlier(attempt)
                return None
            if self._stuck is not None and not self._stuck.is_done:  # the hung thread may still use the arena
                raise stalled_error(attempt)
            self._stuck = None
            plan = self._staging.plan(contents)
            # An outdated checkpoint is replaced only if the new save holds as much.
            replaces = self._outdated[0] == iteration and has_optimizer >= self._outdated[1]
            attempt = replace(attempt, layout=plan.layout, replaces=replaces)
            self._start(self._new_job(attempt, contents, plan, shared), called, start)
            if not self._policy.async_save:
                self.wait()
        except BaseException as error:
            problem = (
                no_memory_error(attempt, error) if isinstance(error, torch.OutOfMemoryError) else as_problem(error)
            )
            messages.abort(self._channel, attempt, problem, shared)
            self._note_earlier(attempt)
            if self._started is not None and self._started.attempt.name == attempt.name:
                self._detach(self._started)
                self.drain(_LINGER_S)  # the thread removes its files, and is idle for the next save
            if not isinstance(error, TrainerError | torch.OutOfMemoryError):
                raise
            self._add_report(SaveReport(iteration, attempt.target, 0, 0.0, error=problem))
        self.results.blocked_s += time.perf_counter() - called
        return None if self._policy.async_save else self.results.reports.pop()

    def reports(self) -> list[SaveReport]:
        """Return reports on background saves ended since the last call, without waiting."""
        if self._started is not None and self._started.is_over:
            self.wait()
        reports, self.results.reports = self.results.reports, []
        return reports

    def wait(self) -> None:
        """Wait for the save under way, unless it was aborted, and record its outcome.

        An exception such as KeyboardInterrupt during the wait leaves a background save under way.
        """
        save_job = self._started
        if save_job is None:
            return
        attempt, snapshot, job = save_job.attempt, save_job.snapshot, save_job.job
        error, goes_on = None, False
        try:
            if snapshot.is_aborted and not job.is_done:
                raise stalled_error(attempt)
            job.wait(self._policy.commit_timeout_s, where=attempt.target)
            self._newest = attempt.iteration, save_job.contents.has_optimizer
            self._in_doubt.clear()  # rank 0 runs attempts in sequence, so all earlier ones are decided
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
                self._detach(save_job)
        if not self._policy.async_save:
            save_job.blocked_s = time.perf_counter() - save_job.start
        self._add_report(save_job.report(error))

    def _is_saved(self, iteration: int, *, with_optimizer: bool) -> bool:
        """Return whether `iteration` is already saved, with optimizer state if required.

        Only the newest iteration saved or loaded counts, since a run ends by saving it. An older iteration is saved
        again, whether or not retention deleted it. An attempt in doubt counts if it turns out to be committed.
        """
        newest, is_full = self._newest
        return (newest == iteration and is_full >= with_optimizer) or any(
            attempt.iteration == iteration and full >= with_optimizer and messages.is_committed(attempt)
            for attempt, full in self._in_doubt
        )

    def _detach(self, save_job: SaveJob) -> None:
        """Stop waiting for a save: remove its step hooks, and abort its snapshot if its thread still runs."""
        self._started = None
        if not save_job.job.is_done:  # it may still read live memory
            save_job.snapshot.abort()
            self._stuck = save_job.job
        for hook in save_job.hooks:
            hook.remove()
        self._attempts.earlier += save_job.earlier
        # After a commit only rank 0's message is left: its decision.
        if self._channel.coordinates or not save_job.shared.current.made_checkpoint:
            self._note_earlier(save_job.attempt)

    @property
    def is_saving(self) -> bool:
        """Return whether a background save is under way."""
        return self._started is not None and not self._started.job.is_done

    @property
    def landing(self) -> Landing | None:
        """Return the last save until its outcome is recorded."""
        if (save_job := self._started) is None:
            return None
        return Landing(save_job.attempt.iteration, save_job.job, self._policy.commit_timeout_s)

    @property
    def attempts(self) -> int:
        """Return the number of started saves, which is equal on all ranks while they make the same calls."""
        return self._attempts.count

    def drain(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until the background thread is idle, even after an aborted save."""
        job = self._stuck if self._started is None else self._started.job
        if job is not None:
            job.ends(timeout_s)

    def abandon(self) -> None:
        """Wait briefly for the save under way, which may still commit, and release the lock before a failing exit."""
        try:
            self.drain(_LINGER_S)
            if (landing := self.landing) is not None and self.is_saving:
                landing.give_up()
            else:
                self.wait()  # logs its failure
        finally:  # also after an interrupt or an unexpected error
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
        """Close the checkpointer. After an interrupt, call it again to finish closing."""
        self.close()

    def _start(self, save_job: SaveJob, called: float, start: float) -> None:
        """Hand a save to the background thread, and hook its optimizers' next steps to wait for its memory."""
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
            save_job.snapshot.abort()  # the program may continue, and change memory not yet copied
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

    def _note_earlier(self, attempt: Attempt) -> None:
        """Note an attempt for the next save, which removes its remains."""
        self._attempts.earlier.append((attempt.iteration, attempt.name))

    def _add_report(self, report: SaveReport) -> None:
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
        """Copy the remaining live memory, which may then change. If the disk stalls meanwhile, abort the save.

        An exception such as KeyboardInterrupt aborts the save: the program may change memory not yet copied.
        """
        snapshot, was_aborted = save_job.snapshot, save_job.snapshot.is_aborted
        try:
            snapshot.release()
        except BaseException:
            snapshot.abort()
            raise
        if snapshot.is_aborted and not was_aborted:
            messages.abort(self._channel, save_job.attempt, stalled_error(save_job.attempt), save_job.shared)
