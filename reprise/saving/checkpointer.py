"""Saves a run's state while it trains, one save at a time. `saving/save_job.py` runs a single save."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from reprise.commit.attempt import Attempt, Copying, Hosts
from reprise.commit.commit_state import Outcome
from reprise.commit.joint_plan import KnownPlans
from reprise.commit.messages import Message
from reprise.commit.replicas import ReplicaDigests
from reprise.commit.shared_attempt import SharedAttempt
from reprise.errors import CheckpointError, TrainerError
from reprise.format.host_file import attempt_of
from reprise.loading.reader import Checkpoint, open_checkpoint
from reprise.loading.restorer import Restored
from reprise.ranks.channel import StoreChannel
from reprise.ranks.error_message import as_problem
from reprise.saving.column_sharing import LocalRanks
from reprise.saving.plan import Plan
from reprise.saving.policy import SavePolicy, SaveReport, SaveResults
from reprise.saving.retention import decide_expired, delete
from reprise.saving.save_job import SaveJob, no_memory_error
from reprise.saving.snapshot import Snapshot, stalled_error
from reprise.storage.files import FILE_SYSTEM, Files
from reprise.storage.folder import CheckpointFolder
from reprise.storage.lock import FolderLock
from reprise.storage.paths import is_symlink
from reprise.storage.shared_folder import require_lock
from reprise.storage.worker import Job, Worker
from reprise.tensors.live import Contents
from reprise.tensors.memory import PINNING, Arena

_log = logging.getLogger(__name__)

# The fraction of a save's timeout during which the background thread waits for a message. Its error names the silent
# rank. The main thread, which waits for the full timeout, cannot name it.
_PATIENCE = 0.8
# torchrun sends SIGKILL 30 s after SIGTERM (torch/distributed/elastic/multiprocessing/api.py).
LINGER_S = 20.0
_NONE = -1, False


class Checkpointer:
    """Saves a rank's share of a run's checkpoints. All ranks make the same calls in order, on the main thread.

    The run owns its folder: a leader holds the folder's lock, and all its host's ranks see the same folder. A shared
    folder is treated as a single host's folder, which has all ranks and is led by rank 0.

    Args:
        nonce: This launch's random name, equal on all ranks. Attempts are named after it.
        local_ranks: This host's ranks, including this rank. If empty, columns are written row by row.
        hosts: The hosts, each with its own folder at the policy's path. None if all hosts share a folder.
        copying: The copies of local checkpoints. None for a shared folder.

    Attributes:
        folder: This host's folder.
        attempts: How many saves were started, equal on all ranks while they make the same calls.
        job: The save on the background thread until its outcome is recorded, or an aborted save's hung thread.
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
        copying: Copying | None = None,
    ) -> None:
        self._policy, self._channel, self._copying, self._nonce = policy, channel, copying, nonce
        self.folder = CheckpointFolder(policy.folder, files or FILE_SYSTEM, policy.terms)
        self._hosts, self._is_local = hosts or Hosts.of(channel.ranks), hosts is not None
        self._lock: FolderLock | None = None
        if channel.rank in self._hosts.leaders:
            another, is_local = policy.terms.another, self._is_local
            self._lock = FolderLock(self.folder.root, nonce, another=another, is_local=is_local, owner=self)
        self._agreements = 0
        self._worker = Worker("checkpoint")
        self._worker_channel = channel.clone(_PATIENCE * policy.commit_timeout_s)
        self._local_ranks = LocalRanks(self._worker_channel, local_ranks)
        self._plan: Plan | None = None
        self._arena = Arena(0, is_pinned=False)
        self._plans, self.attempts = KnownPlans(), 0
        # The iteration saved or loaded last, and one whose checkpoint is to be replaced. Each has whether it holds
        # optimizer state, as has that of the last attempt whose outcome this rank stopped waiting for.
        self._saved = self._outdated = _NONE
        self._in_doubt: tuple[Attempt, tuple[int, bool]] | None = None
        self._verified = -1  # the loaded checkpoint, if all its digests were checked
        self._left = dict[str, list[str]]()  # see `SharedAttempt.left`: of earlier attempts, and the one last started
        self._started: SaveJob | None = None
        self.job: Job | None = None
        self.results = SaveResults()

    def start(self) -> None:
        """Take the lock, sweep up after dead attempts, and check whether all ranks see the same folder.

        Raises:
            LockError: Another job writes to the folder. Every rank raises.
            CheckpointError: The folder cannot be written, or some rank does not see its leader's lock there. Every rank
                raises.
        """
        elsewhere, ranks = frozenset[str](), self._hosts.ranks_with(self._channel.rank)
        if self._is_local:
            with self._leading() as lock:
                if lock is not None:
                    lock.acquire()
            elsewhere = self._committed_elsewhere()
        with self._leading() as lock:
            if lock is not None:
                self.take_folder(elsewhere)
                if len(ranks) > 1:
                    lock.check()  # synced, so the others can read it
        with self._leading() as lock:
            if lock is None:
                require_lock(self.folder, self._nonce, leader=ranks[0])

    def take_folder(self, elsewhere: Collection[str] = ()) -> None:
        """Take the lock and sweep up after dead attempts, on a leader alone.

        A save into a shared folder may call this on the coordinator in place of `start`, and report the outcome to the
        other ranks itself. Each save then checks whether they see the folder.

        Args:
            elsewhere: Attempts committed by another host, which are completed here. All others are swept.

        Raises:
            LockError: Another job writes to the folder.
            CheckpointError: The folder cannot be written.
        """
        folder = self.folder
        with folder.writing():
            assert self._lock is not None
            self._lock.acquire()
            for iteration, attempt in folder.partials():
                if attempt in elsewhere and attempt_of(folder.partial(iteration, attempt)) == attempt:
                    folder.commit(iteration, attempt)
                    _log.warning("completed iteration %d on this host, since another host has committed it", iteration)
            for path in folder.sweep():
                _log.info("swept %s, left by an interrupted save or deletion", path.name)

    def _committed_elsewhere(self) -> frozenset[str]:
        """Return all attempts committed on some host, whose prepared parts are valid on the others. All ranks."""
        attempts = list[str | None]()
        if self._lock is not None:
            with contextlib.suppress(OSError):  # the sweep reports it
                attempts = [attempt_of(self.folder.iteration(iteration)) for iteration in self.folder.committed()]
        joined = self._channel.join(f"folder/{self._nonce}/attempts", attempts, lambda rows: [*set().union(*rows)])
        return frozenset(joined) - {None}

    @contextlib.contextmanager
    def _leading(self) -> Iterator[FolderLock | None]:
        """Yield the lock if this rank leads a host. An exception in the block on any rank is raised on every rank."""
        self._agreements += 1
        with self._channel.agreed(f"folder/{self._nonce}/{self._agreements}"), self.folder.writing():
            yield self._lock

    def note_loaded(self, restored: Restored) -> None:
        """Note the loaded checkpoint. If it lies in this folder, it need not be saved again."""
        checkpoint = restored.checkpoint
        folder = self.folder.iteration(checkpoint.iteration)
        if not is_symlink(folder) and checkpoint.path.resolve() == folder.resolve():
            self._saved = checkpoint.iteration, checkpoint.has_optimizer
            if restored.is_verified and self._copying is None:
                self._verified = checkpoint.iteration

    def find_saved(self, iteration: int, is_same: Callable[[Checkpoint], bool] = lambda _: True) -> None:
        """Note this iteration's checkpoint in the folder, if it can be opened. Collective.

        Args:
            is_same: Returns whether the checkpoint is the one wanted. Called on rank 0.
        """

        def find() -> bool | None:
            with contextlib.suppress(TrainerError):  # missing or damaged: the iteration is saved again
                if is_same(checkpoint := open_checkpoint(self.folder.iteration(iteration), self.folder.files)):
                    return checkpoint.has_optimizer
            return None

        has_optimizer = self._channel.from_first(f"saved/{self._nonce}", find)
        if has_optimizer is not None:
            self._saved = iteration, has_optimizer

    def mark_outdated(self, iteration: int) -> None:
        """Mark the checkpoint at `iteration` as incomplete: the next save with this iteration replaces it.

        Only the checkpoint saved or loaded last by this process is marked. Others must not be deleted.
        """
        if self._saved[0] == iteration:
            self._outdated, self._saved = self._saved, _NONE

    def rewind(self, iteration: int, given_up: Collection[int] = ()) -> None:
        """Move overtaken checkpoints (newer than `iteration`, or in `given_up`) aside, then apply retention.

        Retention runs here because on a full disk no save would complete and make room for the next. Checkpoints are
        deleted only if the newest was loaded with all its digests checked, so at least a good one stays.
        """
        self.wait()
        if self._saved[0] > iteration:
            self._saved = _NONE
        if self._in_doubt is not None and self._in_doubt[0].iteration > iteration:
            self._in_doubt = None
        with self._leading() as lock:
            if lock is None:
                return
            folder, retention = self.folder, self._policy.retention
            overtaken = [number for number in folder.taken() if number > iteration or number in given_up]
            for path in folder.supersede(overtaken):
                _log.info("an overtaken checkpoint of this run is kept as %s", path.name)
            expired = decide_expired(folder, retention)
            if not expired or folder.committed()[-1] != self._verified:
                return
            rule = f"{folder.terms.keep}={retention.max_checkpoint_keep}"
            for number in delete(folder, expired, attempt=self._nonce, lock=lock):
                _log.info("deleted iteration %d, which %s does not keep", number, rule)

    def prepare(self, contents: Contents) -> None:
        """Allocate staging memory for saving `contents`, after the save under way, and touch it in the background."""
        self.wait()
        self._planned(contents)
        self._populate()

    def save(self, iteration: int, contents: Contents) -> SaveReport | None:
        """Save `contents` as `iteration`, unless this process saved or loaded that iteration last.

        Under the policy `copies_at_call`, every call saves.

        An older iteration is saved again, and its present folder is renamed as superseded. A save that did not end in
        time counts if it turns out to be committed, as other ranks may know already.

        A background save first waits for the previous save, then returns while the disk writes. The next step in
        `contents.optimizers` waits until the memory it changes is written or copied. Under the policy
        `copies_at_call`, all memory is copied before this call returns. A failed save is logged and reported, never
        raised: training continues and committed checkpoints are untouched. Only an unexpected error, neither a
        TrainerError nor out of device memory, is raised, on the failing rank; other ranks report it.

        Returns:
            The inline save's report. None if nothing was to do, or if the save continues in the background.
        """
        called, blocked_s, name = time.perf_counter(), self.results.blocked_s, f"{self._nonce}-{self.attempts + 1}"
        target = self.folder.iteration(iteration)
        shared = SharedAttempt(name, self._worker_channel, self._hosts)
        try:
            self.attempts += 1  # before anything may fail, so that all ranks have the same count
            self.wait()
            start = time.perf_counter()
            if self._in_doubt is not None and self._in_doubt[0].is_committed():
                self._saved, self._in_doubt = self._in_doubt[1], None
            newest, was_whole = self._saved
            is_saved = newest == iteration and was_whole >= contents.has_optimizer
            if is_saved and not self._policy.copies_at_call:  # else the tensors may have changed since
                _log.info("iteration %d needs no new save", iteration)
                if self._channel.coordinates:
                    shared.decide(Message(number=iteration))
                return None
            if self.job is not None and not self.job.is_done:  # a hung thread may still use the arena
                raise stalled_error(target)
            self._start(iteration, name, contents, shared, called=called, start=start)
            if not self._policy.async_save:
                self.wait()
        except BaseException as error:
            problem = as_problem(error)
            if isinstance(error, torch.OutOfMemoryError):
                problem = no_memory_error(target, error)
            shared.abort(problem)
            if self._started is not None and self._started.shared is shared:
                self._detach(self._started)
                self.drain(LINGER_S)  # the thread removes its files, and is idle for the next save
            if not isinstance(error, TrainerError | torch.OutOfMemoryError):
                raise
            self._add_report(SaveReport(iteration, target, 0, error=problem))
        finally:
            if self._left is not shared.left:  # a hung thread deletes none of these messages if it commits now
                self._left = self._left | shared.left
        self.results.blocked_s = blocked_s + time.perf_counter() - called
        return None if self._policy.async_save else self.results.reports.pop()

    def reports(self) -> list[SaveReport]:
        """Return reports on background saves ended since the last call, without waiting."""
        if self._started is not None and (self._started.job.is_done or self._started.snapshot.is_aborted):
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
        result, error, goes_on = (attempt.iteration, save_job.contents.has_optimizer), None, False
        try:
            if snapshot.is_aborted and not job.is_done:
                raise stalled_error(attempt.target)
            job.wait(self._policy.commit_timeout_s, where=attempt.target)
            self._saved, self._in_doubt = result, None
        except TrainerError as failure:
            error = failure
            if not job.is_done and not snapshot.is_aborted:
                snapshot.abort()
                save_job.shared.abort(failure)
            if save_job.shared.current.outcome is not Outcome.FAILED:
                self._in_doubt = attempt, result
        except BaseException as interrupt:
            goes_on = self._policy.async_save and interrupt is not job.error
            raise
        finally:
            if not goes_on:
                self._detach(save_job)
        report, seconds = save_job.report, time.perf_counter() - save_job.start
        report.seconds, report.copied_bytes, report.error = report.seconds or seconds, snapshot.copied_bytes, error
        if not self._policy.async_save:
            report.blocked_s = seconds
        self._add_report(report)

    def _detach(self, save_job: SaveJob) -> None:
        """Stop waiting for a save: remove its step hooks, and abort its snapshot if its thread still runs."""
        self._started = None
        if save_job.job.is_done:
            self.job = None
        else:  # it may still read live memory
            save_job.snapshot.abort()
        for hook in save_job.hooks:
            hook.remove()

    @property
    def is_saving(self) -> bool:
        """Return whether a background save is under way."""
        return self._started is not None and not self._started.job.is_done

    def drain(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until the background thread is idle, even after an aborted save."""
        if self.job is not None:
            self.job.ends(timeout_s)

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
            if self._lock is not None:
                self._lock.release()

    def close(self) -> None:
        """Wait for the save under way, end the background thread and release the lock. May be called again."""
        self.wait()
        if self.job is None or self.job.is_done:  # else a hung thread may still use what follows
            self._worker.close(self._policy.commit_timeout_s)
            self._local_ranks.drop()
            self._arena.close()
            self._plan = None
        self.abandon()

    def _start(
        self, iteration: int, name: str, contents: Contents, shared: SharedAttempt, *, called: float, start: float
    ) -> None:
        """Hand a save to the background thread, and hook its optimizers' next steps to wait for its memory."""
        plan, interval = self._planned(contents), self._policy.check_replicas
        compares = interval > 0 and self.attempts % interval == 0
        memory, written_bytes = plan.begin(), sum(piece.hi - piece.lo for piece in plan.pieces)
        shared.left |= self._left
        self._left = shared.left
        # An outdated checkpoint is replaced only if the new save holds as much.
        replaces = self._outdated[0] == iteration and contents.has_optimizer >= self._outdated[1]
        attempt = Attempt(iteration, name, self.folder, plan.layout, self._hosts, replaces)
        save_job = SaveJob(
            attempt=attempt,
            contents=contents,
            table=plan.table,
            replicas=ReplicaDigests(plan.replicated) if compares and plan.replicated else None,
            channel=self._worker_channel,
            shared=shared,
            plans=self._plans,
            lock=self._lock,
            copying=self._copying,
            plan=plan,
            snapshot=Snapshot(memory, plan.order, arena=self._arena, policy=self._policy),
            retention=self._policy.retention,
            local_ranks=self._local_ranks,
            start=start,
            report=SaveReport(iteration, attempt.target, written_bytes, waited_s=start - called),
        )
        try:
            hooks = [optimizer.register_step_pre_hook for optimizer in plan.optimizers]
            save_job.hooks += [register(lambda *_: self._release(save_job)) for register in hooks]
            save_job.job = self.job = self._worker.submit(save_job.run)
            self._started = save_job
            save_job.report.blocked_s = time.perf_counter() - start
            self._populate()
            if self._policy.copies_at_call:
                self._release(save_job)
        except BaseException:
            save_job.snapshot.abort()  # the program may continue, and change memory not yet copied
            raise

    def _planned(self, contents: Contents) -> Plan:
        """Return the plan for saving `contents`: the previous plan if the tensors are the very same.

        A new plan may replace the arena by a larger arena, so no save may be under way. Without memory for it, steps
        wait for the disk.
        """
        if self._plan is None or not self._plan.suits(contents):
            self._plan = Plan(contents, self._policy, self._channel.rank)
            total_bytes = self._plan.staging_bytes
            if total_bytes > self._arena.total_bytes:
                try:
                    is_pinned = any(device.type in PINNING for device in self._plan.devices)
                    larger = Arena(total_bytes, is_pinned=is_pinned)
                    self._arena.close()
                    self._arena = larger
                except (CheckpointError, OSError) as error:
                    message = "cannot allocate %d B of staging memory, so steps will wait for the disk: %s"
                    _log.error(message, total_bytes, error)
        return self._plan

    def _populate(self) -> None:
        """Fault in a new arena's pages on the worker, after jobs submitted earlier.

        Most chunks are on disk by the time a step needs copies. In the other order, the first save with 124M parameters
        started after the page faults, and was durable after 4.2 to 5.5 s instead of 1.2 s.
        """
        if not self._arena.is_touched:
            self._arena.is_touched = True
            self._worker.submit(self._arena.touch)

    def _add_report(self, report: SaveReport) -> None:
        self.results.add(report)
        if report.error is not None and self._channel.coordinates:
            _log.error("iteration %d was not saved: %s", report.iteration, report.error)

    def _release(self, save_job: SaveJob) -> None:
        """Copy the remaining live memory, which may then change. If the disk stalls meanwhile, abort the save.

        An exception such as KeyboardInterrupt aborts the save: the program may change memory not yet copied.
        """
        snapshot, was_aborted, start = save_job.snapshot, save_job.snapshot.is_aborted, time.perf_counter()
        try:
            snapshot.release()
        except BaseException:
            snapshot.abort()
            raise
        if snapshot.is_aborted and not was_aborted:
            save_job.shared.abort(stalled_error(save_job.attempt.target))
        blocked_s = time.perf_counter() - start
        save_job.report.blocked_s += blocked_s
        self.results.blocked_s += blocked_s
