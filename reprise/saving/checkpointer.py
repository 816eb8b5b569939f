"""Saves a run's state while it trains, one save at a time. `saving/save_job.py` runs a single save."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch

from reprise.commit.attempt import Attempt, Hosts
from reprise.commit.commit_state import Outcome
from reprise.commit.joint_plan import KnownPlans
from reprise.commit.messages import DecisionMessage
from reprise.commit.protocol import LocalSaves
from reprise.commit.replicas import ReplicaDigests
from reprise.commit.shared_attempt import SharedAttempt
from reprise.errors import TrainerError
from reprise.format.layout import Layout
from reprise.loading.reader import Checkpoint, open_checkpoint
from reprise.loading.restorer import Restored
from reprise.ranks.channel import StoreChannel
from reprise.ranks.error_message import as_problem
from reprise.saving.column_sharing import LocalRanks
from reprise.saving.owned_folder import OwnedFolder
from reprise.saving.policy import SavePolicy, SaveReport, SaveResults
from reprise.saving.save_job import SaveJob, in_doubt_error, no_memory_error
from reprise.saving.snapshot import Staging, stalled_error
from reprise.storage.files import FILE_SYSTEM, Files
from reprise.storage.folder import CheckpointFolder
from reprise.storage.paths import is_symlink
from reprise.storage.worker import Job, Worker
from reprise.tensors.live import Contents

_log = logging.getLogger(__name__)

# The fraction of a save's timeout during which the background thread waits for a message. Its error names the silent
# rank. The main thread, which waits for the full timeout, cannot name it.
_PATIENCE = 0.8
# torchrun sends SIGKILL 30 s after SIGTERM (torch/distributed/elastic/multiprocessing/api.py).
LINGER_S = 20.0


class Checkpointer:
    """Saves a rank's share of a run's checkpoints. All ranks make the same calls in order, on the main thread.

    Args:
        nonce: This launch's random name, equal on all ranks. Attempts are named after it.
        local_ranks: This host's ranks, including this rank. If empty, columns are written row by row.
        hosts: The hosts, each with its own folder at the policy's path. None if all hosts share a folder.
        local: What the hosts' leaders keep between saves. None for a shared folder.

    Attributes:
        attempts: How many saves were started, equal on all ranks while they make the same calls.
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
        self._policy, self._channel, self._local, self._nonce = policy, channel, local, nonce
        self._owned = OwnedFolder(
            CheckpointFolder(policy.folder, files or FILE_SYSTEM, policy.terms), channel, nonce, hosts
        )
        self._worker = Worker("checkpoint")
        self._worker_channel = channel.clone(_PATIENCE * policy.commit_timeout_s)
        self._local_ranks = LocalRanks(self._worker_channel, local_ranks)
        self._staging = Staging(policy, channel.rank, self._worker)
        self._plans, self.attempts = KnownPlans(), 0
        # The newest saved or loaded iteration, then attempts whose outcome this rank stopped waiting for. Each has
        # whether it holds optimizer state, and an attempt in doubt.
        self._saved = list[tuple[int, bool, Attempt | None]]()
        self._outdated = -1, False
        self._verified = -1  # the loaded checkpoint, if all its digests were checked
        self._left = list[str]()  # keys of this rank's messages on earlier attempts
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
        with self._local_ranks.check_same_host(self._channel, f"hosts/{self._nonce}"):
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
        checkpoint = restored.checkpoint
        folder = self._owned.folder.iteration(checkpoint.iteration)
        if not is_symlink(folder) and checkpoint.path.resolve() == folder.resolve():
            self.note_saved(checkpoint.iteration, has_optimizer=checkpoint.has_optimizer)
            if restored.is_verified and self._local is None:
                self._verified = checkpoint.iteration

    def find_saved(self, iteration: int, is_same: Callable[[Checkpoint], bool] = lambda _: True) -> None:
        """Note this iteration's checkpoint in the folder, if it can be opened. Collective.

        Args:
            is_same: Returns whether the checkpoint is the one wanted. Called on rank 0.
        """
        folder = self._owned.folder

        def find() -> bool | None:
            try:
                checkpoint = open_checkpoint(folder.iteration(iteration), folder.files)
            except TrainerError:  # missing or damaged: the iteration is saved again
                return None
            return checkpoint.has_optimizer if is_same(checkpoint) else None

        has_optimizer = self._channel.from_first(f"saved/{self._nonce}", find)
        if has_optimizer is not None:
            self.note_saved(iteration, has_optimizer=has_optimizer)

    def note_saved(self, iteration: int, *, has_optimizer: bool) -> None:
        """Note an iteration already in the folder, which need not be saved again."""
        self._saved = [(iteration, has_optimizer, None)]

    def mark_outdated(self, iteration: int) -> None:
        """Mark the checkpoint at `iteration` as incomplete: the next save with this iteration replaces it.

        Only the newest checkpoint saved or loaded by this process is marked. Others must not be deleted.
        """
        for saved in self._saved[:1]:
            if saved[0] == iteration and saved[2] is None:
                self._outdated = saved[:2]
                self._saved.remove(saved)

    def rewind(self, iteration: int, given_up: Collection[int] = ()) -> None:
        """Move overtaken checkpoints (newer than `iteration`, or in `given_up`) aside, then apply retention.

        Retention runs here because on a full disk no save would complete and make room for the next.
        """
        self.wait()
        self._saved = [saved for saved in self._saved if saved[0] <= iteration]
        self._owned.rewind(iteration, given_up, self._policy.retention, verified=self._verified)

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
        called, name = time.perf_counter(), f"{self._nonce}-{self.attempts + 1}"
        attempt = Attempt(iteration, name, self._owned.folder, Layout((), {}), self._owned.hosts)
        shared = SharedAttempt(attempt, self._channel.rank, self._channel.ranks)
        try:
            self.attempts += 1  # before anything may fail, so that all ranks have the same count
            self.wait()
            start = time.perf_counter()
            has_optimizer = contents.has_optimizer
            if not again and self._is_saved(iteration, with_optimizer=has_optimizer):
                _log.info("iteration %d needs no new save", iteration)
                if self._channel.coordinates:
                    shared.decide(self._channel, DecisionMessage(iteration=iteration, is_earlier=True))
                return None
            if self._stuck is not None and not self._stuck.is_done:  # the hung thread may still use the arena
                raise stalled_error(attempt.target)
            self._stuck = None
            contents = self._staging.cast(contents)
            # An outdated checkpoint is replaced only if the new save holds as much.
            replaces = self._outdated[0] == iteration and has_optimizer >= self._outdated[1]
            self._start(replace(attempt, replaces=replaces), contents, shared, called=called, start=start)
            if not self._policy.async_save:
                self.wait()
        except BaseException as error:
            problem = as_problem(error)
            if isinstance(error, torch.OutOfMemoryError):
                problem = no_memory_error(attempt, error)
            shared.abort(self._channel, problem)
            if self._started is not None and self._started.shared is shared:
                self._detach(self._started)
                self.drain(LINGER_S)  # the thread removes its files, and is idle for the next save
            if not isinstance(error, TrainerError | torch.OutOfMemoryError):
                raise
            self._add_report(SaveReport(iteration, attempt.target, 0, 0.0, error=problem))
        finally:
            if self._left is not shared.left:
                self._left = [*self._left, *shared.left]
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
        has_optimizer = save_job.contents.has_optimizer
        error, goes_on = None, False
        try:
            if snapshot.is_aborted and not job.is_done:
                raise stalled_error(attempt.target)
            job.wait(self._policy.commit_timeout_s, where=attempt.target)
            # Rank 0 runs attempts in sequence, so all earlier ones are decided.
            self.note_saved(attempt.iteration, has_optimizer=has_optimizer)
        except TrainerError as failure:
            error = failure
            if not job.is_done and not snapshot.is_aborted:
                snapshot.abort()
                if not save_job.shared.abort(self._channel, failure):
                    error = in_doubt_error(attempt)
            if save_job.shared.current.outcome is not Outcome.FAILED:
                self._saved.append((attempt.iteration, has_optimizer, attempt))
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
        return any(
            saved == iteration and is_full >= with_optimizer and (attempt is None or attempt.is_committed())
            for saved, is_full, attempt in self._saved
        )

    def _detach(self, save_job: SaveJob) -> None:
        """Stop waiting for a save: remove its step hooks, and abort its snapshot if its thread still runs."""
        self._started = None
        if not save_job.job.is_done:  # it may still read live memory
            save_job.snapshot.abort()
            self._stuck = save_job.job
        for hook in save_job.hooks:
            hook.remove()

    @property
    def job(self) -> Job | None:
        """Return the last save on the background thread, until its outcome is recorded."""
        return None if self._started is None else self._started.job

    @property
    def is_saving(self) -> bool:
        """Return whether a background save is under way."""
        return self.job is not None and not self.job.is_done

    def drain(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until the background thread is idle, even after an aborted save."""
        job = self.job or self._stuck
        if job is not None:
            job.ends(timeout_s)

    def abandon(self) -> None:
        """Wait briefly for the save under way, which may still commit, and release the lock before a failing exit."""
        try:
            self.drain(LINGER_S)
            if self._started is not None and self.is_saving:
                iteration = self._started.attempt.iteration
                _log.error("iteration %d was not saved: its save did not end within %.0f s", iteration, LINGER_S)
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

    def _start(
        self, attempt: Attempt, contents: Contents, shared: SharedAttempt, *, called: float, start: float
    ) -> None:
        """Hand a save to the background thread, and hook its optimizers' next steps to wait for its memory."""
        plan, interval = self._staging.plan(contents), self._policy.check_replicas
        compares = interval > 0 and self.attempts % interval == 0
        save_job = SaveJob(
            attempt=replace(attempt, layout=plan.layout),
            contents=contents,
            pieces=plan.pieces,
            replicas=ReplicaDigests(plan.saved if compares else ()),
            channel=self._worker_channel,
            shared=shared,
            plans=self._plans,
            lock=self._owned.lock,
            local=self._local,
            plan=plan,
            snapshot=self._staging.begin(plan),
            retention=self._policy.retention,
            local_ranks=self._local_ranks,
            may_share=self._staging.may_share(plan),
            start=start,
            waited_s=start - called,
        )
        shared.left += self._left
        self._left = shared.left
        try:
            if self._policy.async_save:
                save_job.hooks += [self._hold_back(optimizer, save_job) for optimizer in contents.optimizers]
            save_job.job = self._worker.submit(save_job.run)
            self._started = save_job
            save_job.blocked_s = time.perf_counter() - start
            self._staging.populate()
            if self._policy.copies_at_call:
                self._release(save_job)
        except BaseException:
            save_job.snapshot.abort()  # the program may continue, and change memory not yet copied
            raise

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
            save_job.shared.abort(self._channel, stalled_error(save_job.attempt.target))
