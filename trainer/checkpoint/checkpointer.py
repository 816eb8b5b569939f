"""Saves and restores the state of a run, one save at a time. Each step of it lives in a module of its own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.checkpoint.commit.channel import StoreChannel
from trainer.checkpoint.format.layout import TensorKind
from trainer.checkpoint.format.names import MANIFEST
from trainer.checkpoint.loading import choose
from trainer.checkpoint.loading.loader import LoadReport, fill
from trainer.checkpoint.loading.reader import Checkpoint, read_places
from trainer.checkpoint.loading.replicas import check_replicas
from trainer.checkpoint.loading.same_checkpoint import open_same
from trainer.checkpoint.loading.verify import verify_share
from trainer.checkpoint.policy import SavePolicy, SaveReport
from trainer.checkpoint.saving.save_job import cannot_write, decide_expired, delete
from trainer.checkpoint.saving.saver import Saver
from trainer.checkpoint.storage.files import Files
from trainer.checkpoint.storage.folder import CheckpointFolder
from trainer.checkpoint.storage.lock import FolderLock
from trainer.checkpoint.storage.patience import Patience, PatientFiles, await_sight
from trainer.checkpoint.storage.progress_line import ProgressLine
from trainer.checkpoint.storage.shared_folder import require_mark
from trainer.checkpoint.tensors.live import Contents, LiveTensor
from trainer.errors import LaunchError, TrainerError

_log = logging.getLogger(__name__)

# torchrun kills 30 s after it has asked to end (torch/distributed/elastic/multiprocessing/api.py).
_LINGER_S = 20.0


class Checkpointer:
    """The checkpoints of one run, on one rank. All ranks make the same calls in the same order, on the main thread.

    Args:
        nonce: a name of this run of the program, equal on all ranks; attempts are named after it.
        local_ranks: the ranks on this host, this one among them; where they are not known, columns are written by row.
        patience: how long a load tries reads again that fail.
    """

    def __init__(
        self,
        policy: SavePolicy,
        channel: StoreChannel,
        *,
        nonce: str,
        files: Files | None = None,
        local_ranks: Sequence[int] = (),
        patience: Patience | None = None,
    ) -> None:
        self._policy, self._channel, self._nonce = policy, channel, nonce
        self._files, self._patience = files or Files(), patience or Patience()
        self._agreements = 0
        self._is_loaded_whole = False
        self._lock: FolderLock | None = None
        self._folder = None if policy.folder is None else CheckpointFolder(policy.folder, self._files)
        self._saver = None
        if self._folder is not None:
            self._saver = Saver(policy, self._folder, channel, nonce=nonce, local_ranks=local_ranks)

    def start(self) -> None:
        """Take the lock, sweep what dead attempts left, and make sure that all ranks see one folder.

        Raises:
            LockError: on every rank, if another job writes to the folder.
            CheckpointError: on every rank, if one of them does not see the folder of rank 0.
        """
        if self._folder is None:
            return
        problem: TrainerError | None = None
        if self._channel.rank == 0:
            try:
                lock = FolderLock(self._folder.root, self._nonce)
                lock.acquire()
                self._lock = lock
                for path in self._folder.sweep():
                    _log.info("swept %s, left by an interrupted save or deletion", path.name)
                if self._channel.world_size > 1:
                    self._files.mark(self._folder.mark(self._nonce))
            except TrainerError as error:
                problem = error
            except OSError as error:
                problem = cannot_write(self._folder.root, error)
        assert self._saver is not None
        self._saver.meet()
        self._agree(problem)
        self._saver.part()
        if self._channel.world_size > 1:
            self._require_shared(self._folder)

    def is_due(self, iteration: int) -> bool:
        """Return whether the policy asks for a save after `iteration`."""
        interval = self._policy.save_interval
        return self._folder is not None and interval > 0 and iteration % interval == 0

    def save(self, iteration: int, contents: Contents) -> SaveReport | None:
        """Save `contents` as `iteration`, unless that checkpoint is there already.

        A background save returns while it is written, after waiting for the one before it: `contents.optimizers` are
        held back at their next step until what that changes is written or copied. A failed save is logged and reported,
        never raised: training goes on and committed checkpoints are untouched. Only what is no TrainerError, a defect
        or a lack of memory, is raised, on its rank; the others report it.

        Returns:
            The report of an inline save; None if there was nothing to do, or the save goes on in the background.
        """
        return None if self._saver is None else self._saver.save(iteration, contents, self._lock)

    def reports(self) -> list[SaveReport]:
        """Return the reports of background saves that have ended since the last call; does not wait."""
        return [] if self._saver is None else self._saver.reports()

    def wait(self) -> None:
        """Wait until no save is under way."""
        if self._saver is not None:
            self._saver.wait()

    def drain(self, timeout_s: float) -> None:
        """Wait until the background thread has nothing to do, not even for a save that was given up, or for a while."""
        if self._saver is not None:
            self._saver.drain(timeout_s)

    @property
    def is_saving(self) -> bool:
        """Return whether a background save is under way."""
        return self._saver is not None and self._saver.is_saving

    @property
    def last_error(self) -> TrainerError | None:
        """Return why the save that ended last became no checkpoint, or None if it did."""
        return None if self._saver is None else self._saver.last_error

    @property
    def failed_saves(self) -> int:
        """Return how many saves in a row have failed."""
        return 0 if self._saver is None else self._saver.failed_saves

    def take_blocked_s(self) -> float:
        """Return for how long saving kept the main thread since the last call."""
        return 0.0 if self._saver is None else self._saver.take_blocked_s()

    def restore(
        self,
        source: choose.LoadSource,
        *,
        check: Callable[[Checkpoint], None],
        live: Callable[[Checkpoint], Sequence[LiveTensor]],
        verify: bool = True,
        verify_all: bool = False,
    ) -> tuple[Checkpoint, LoadReport]:
        """Fill live tensors from the newest valid checkpoint of `source`; all ranks load the same one.

        Args:
            check: refuses a checkpoint of another run before any tensor is read; rank 0 only.
            live: the tensors to fill, given the checkpoint; all ranks.
            verify: check the digests of all blocks that are read.
            verify_all: before that, check those of all blocks of the checkpoint, shared out between the ranks.

        Raises:
            UnreadableError: on every rank, if a rank cannot read the checkpoint now, or does not see it.
            CheckpointError: on every rank, if none can be loaded; damaged ones are logged and skipped, unless named
                exactly.
            MismatchError: on every rank, if one of them finds another checkpoint under the path than rank 0.
        """
        self.wait()
        files = PatientFiles(self._files, self._patience)
        chooser = choose.Chooser(source, files, check, patience=self._patience)
        damage: TrainerError | None = None
        while True:
            path, digest = self._pick(chooser, damage)
            problem: TrainerError | None = None
            try:
                if self._channel.rank:
                    await_sight(path / MANIFEST, self._patience, rank=self._channel.rank)
                checkpoint = open_same(path, digest, files)
                if verify_all:
                    self._verify(checkpoint)
                tensors = live(checkpoint)
                report = self._fill(checkpoint, tensors, verify=verify)
            except TrainerError as error:
                problem = error
            try:
                self._agree(problem)
                break
            except LaunchError:  # a lost rank says nothing of the checkpoint
                raise
            except TrainerError as error:
                damage = error
        self.check_replicas(tensors)
        if self._saver is not None:
            self._saver.loaded(path, checkpoint.iteration, has_optimizer=checkpoint.has_optimizer)
        is_all_read = not checkpoint.has_optimizer or any(
            tensor.spec.kind is TensorKind.OPTIMIZER for tensor in tensors
        )
        self._is_loaded_whole = verify_all or (verify and is_all_read)
        return checkpoint, report

    def check_replicas(self, live: Sequence[LiveTensor]) -> None:
        """Compare the bits of live tensors that several ranks hold. A call of all ranks.

        Raises:
            CheckpointError: on every rank, a ReplicaError on rank 0, naming the first tensor that differs.
        """
        self._agreements += 1
        check_replicas(live, self._channel, f"replicas/{self._nonce}/{self._agreements}")

    def rewind(self, iteration: int) -> None:
        """Rename checkpoints newer than `iteration`, which this run overtakes, out of the way; then delete what
        retention gives up: on a full disk no save will make room for the next."""
        self.wait()
        if self._saver is not None:
            self._saver.rewound(iteration)
        problem: TrainerError | None = None
        if self._channel.rank == 0 and self._folder is not None:
            try:
                names = [*self._folder.committed(), *self._folder.non_folders()]
                newer = [found for found in names if found > iteration]
                for path in self._folder.supersede(newer):
                    _log.info("an abandoned branch of this run is kept as %s", path.name)
                self._retain(self._folder)
            except OSError as error:
                problem = cannot_write(self._folder.root, error)
        self._agree(problem)

    def abandon(self) -> None:
        """Let go of the lock: this process is about to end with an error. A save under way, which is good, may land."""
        if self._saver is not None:
            self._saver.drain(_LINGER_S)
        if self._lock is not None:
            self._lock.release()

    def close(self) -> None:
        """Wait for the save that is under way, end the background thread and let go of the lock."""
        if self._saver is not None:
            self._saver.close()
        self.abandon()

    def _retain(self, folder: CheckpointFolder) -> None:
        """Delete what retention gives up, if the newest was loaded and all of it checked: it is known to be good."""
        assert self._saver is not None
        pinned = self._saver.pinned
        expired, committed = decide_expired(folder, self._policy.retention, pinned=pinned)
        if not expired or committed[-1] not in pinned or not self._is_loaded_whole:
            return
        keep = self._policy.retention.max_checkpoint_keep
        for gone in delete(folder, expired, attempt=self._nonce, lock=self._lock):
            _log.info("deleted iteration %d, which checkpoint.max_checkpoint_keep=%d does not keep", gone, keep)

    def _require_shared(self, folder: CheckpointFolder) -> None:
        """Let every rank find the mark that rank 0 has left in the folder, then remove it."""
        problem: TrainerError | None = None
        mark = folder.mark(self._nonce)
        try:
            if self._channel.rank:
                require_mark(mark, self._files)
        except TrainerError as error:
            problem = error
        try:
            self._agree(problem)
        finally:
            if self._channel.rank == 0:
                with contextlib.suppress(OSError):  # the next start sweeps it
                    self._files.remove_file(mark)

    def _verify(self, checkpoint: Checkpoint) -> None:
        rank, world_size = self._channel.rank, self._channel.world_size
        places = read_places(checkpoint)
        share = sum(place.spec.total_bytes for place in places.values()) // world_size
        line = ProgressLine(f"verifying iteration {checkpoint.iteration}", share)
        checked = verify_share(checkpoint, places, rank=rank, world_size=world_size, progress=line.add)
        _log.info("verified %d bytes of iteration %d on this rank", checked, checkpoint.iteration)

    def _fill(self, checkpoint: Checkpoint, tensors: Sequence[LiveTensor], *, verify: bool) -> LoadReport:
        title = f"loading iteration {checkpoint.iteration}"
        line = ProgressLine(title, sum(tensor.local.nbytes for tensor in tensors))
        return fill(checkpoint, read_places(checkpoint), tensors, verify=verify, progress=lambda done, _: line.at(done))

    def _pick(self, chooser: choose.Chooser, damage: TrainerError | None) -> tuple[Path, str]:
        """Return the next candidate and its digest on every rank.

        Args:
            damage: what any rank found wrong with the last one.
        """
        problem: TrainerError | None = None
        picked = ""
        if self._channel.rank == 0:
            try:
                if damage is not None:
                    chooser.skip(damage)
                path = chooser.pick()
                picked = f"{chooser.digest} {path}"
            except TrainerError as error:
                problem = error
        self._agree(problem)
        self._agreements += 1
        data = self._channel.broadcast(f"pick/{self._nonce}/{self._agreements}", picked.encode())
        digest, _, found = data.decode().partition(" ")
        return Path(found), digest

    def _agree(self, problem: TrainerError | None) -> None:
        self._agreements += 1
        self._channel.agree(f"agree/{self._nonce}/{self._agreements}", problem)
