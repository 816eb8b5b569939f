"""Saves and restores the state of a run, one save at a time. Each step of it lives in a module of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.checkpoint import choose, commit
from trainer.checkpoint.board import Board
from trainer.checkpoint.box import image
from trainer.checkpoint.commit import Attempt
from trainer.checkpoint.files import Files
from trainer.checkpoint.layout import DEFAULT_FILE_BYTES, Kind, Layout, build_layout
from trainer.checkpoint.live import Contents, LiveTensor
from trainer.checkpoint.loader import LoadReport, fill
from trainer.checkpoint.lock import FolderLock
from trainer.checkpoint.manifest import WrittenPiece
from trainer.checkpoint.ownership import Holding, Piece, pieces_of
from trainer.checkpoint.reader import Checkpoint, open_checkpoint, read_places
from trainer.checkpoint.retention import Retention
from trainer.checkpoint.snapshot import Snapshot
from trainer.checkpoint.store import CheckpointFolder
from trainer.checkpoint.worker import Worker
from trainer.checkpoint.writer import Writer
from trainer.errors import CheckpointError, TrainerError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """When to save where, and what stays.

    Args:
        folder: the run's checkpoint folder; None means that saving is off.
        save_interval: save at every multiple of it; 0 means only when `save` is called.
        file_bytes: size in bytes at which a safetensors file is full.
        commit_timeout_s: how long a save may take before it is given up.
    """

    folder: Path | None
    save_interval: int = 0
    retention: Retention = field(default_factory=Retention)
    file_bytes: int = DEFAULT_FILE_BYTES
    commit_timeout_s: float = 1800.0


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What one save did on this rank; `error` is set if the attempt did not become a checkpoint."""

    iteration: int
    path: Path
    written_bytes: int
    seconds: float
    error: TrainerError | None = None


class Checkpointer:
    """The checkpoints of one run, on one rank. All ranks make the same calls in the same order, on the main thread.

    Args:
        nonce: a name of this run of the program, equal on all ranks; attempts are named after it.
    """

    def __init__(self, policy: SavePolicy, board: Board, *, nonce: str, files: Files | None = None) -> None:
        self._policy, self._board, self._nonce = policy, board, nonce
        self._files = files or Files()
        self._worker = Worker("checkpoint")
        self._worker_board = board.clone(policy.commit_timeout_s)
        self._attempts = 0
        self._agreements = 0
        self._present: dict[int, bool] = {}  # iterations known to be there -> with optimizer state
        self._pinned: set[int] = set()
        self._lock: FolderLock | None = None
        self._folder = CheckpointFolder(policy.folder, self._files) if policy.folder is not None else None

    def start(self) -> None:
        """Take the lock and sweep what dead attempts left.

        Raises:
            LockError: on every rank, if another job writes to the folder.
        """
        if self._folder is None:
            return
        problem: TrainerError | None = None
        if self._board.rank == 0:
            try:
                lock = FolderLock(self._folder.root, self._nonce)
                lock.acquire()
                self._lock = lock
                for path in self._folder.sweep():
                    _log.info("swept %s, left by an interrupted save or deletion", path.name)
            except TrainerError as error:
                problem = error
            except OSError as error:
                problem = _cannot_write(self._folder.root, error)
        self._agree(problem)

    def is_due(self, iteration: int) -> bool:
        """Return whether the policy asks for a save after `iteration`."""
        interval = self._policy.save_interval
        return self._folder is not None and interval > 0 and iteration % interval == 0

    def save(self, iteration: int, contents: Contents) -> SaveReport | None:
        """Save `contents` as `iteration`; return None if that checkpoint is there already.

        A failed save is logged and reported, never raised: training goes on and committed checkpoints are untouched.
        Only what is no TrainerError, a defect or a lack of memory, is raised, on its rank; the others report it.
        """
        self._attempts += 1
        if self._folder is None:
            return None
        with_optimizer = any(spec.kind is Kind.OPTIMIZER for spec in contents.specs)
        if iteration in self._present and self._present[iteration] >= with_optimizer:
            _log.info("iteration %d is saved already, nothing to do", iteration)
            return None
        layout = build_layout(contents.specs, file_bytes=self._policy.file_bytes)
        attempt = Attempt(iteration, f"{self._nonce}-{self._attempts}", self._folder, layout)
        start = time.perf_counter()
        pieces = plan(contents.live, layout, self._board.rank)
        snapshot = Snapshot(contents.live, pieces)
        doomed: list[int] = []
        job = self._worker.submit(
            lambda: doomed.extend(self._attempt(attempt, contents, pieces=pieces, snapshot=snapshot))
        )
        error: TrainerError | None = None
        try:
            job.wait(self._policy.commit_timeout_s)
            self._present = {found: has for found, has in self._present.items() if found not in doomed}
            self._present[iteration] = with_optimizer
        except TrainerError as failure:
            error = failure
            snapshot.give_up()
            if self._board.rank == 0:
                _log.error("iteration %d was not saved: %s", iteration, failure)
        written = sum(piece.hi - piece.lo for piece in pieces)
        return SaveReport(iteration, self._folder.iteration(iteration), written, time.perf_counter() - start, error)

    def restore(
        self,
        source: choose.Source,
        *,
        check: Callable[[Checkpoint], None],
        live: Callable[[Checkpoint], Sequence[LiveTensor]],
        verify: bool = True,
    ) -> tuple[Checkpoint, LoadReport]:
        """Fill live tensors from the newest valid checkpoint of `source`; all ranks load the same one.

        Args:
            check: refuses a checkpoint of another run before any tensor is read; rank 0 only.
            live: the tensors to fill, given the checkpoint; all ranks.

        Raises:
            CheckpointError: on every rank, if none can be loaded; damaged ones are logged and skipped, unless named
                exactly.
        """
        chooser = choose.Chooser(source, self._files, check)
        damage: TrainerError | None = None
        while True:
            path = self._pick(chooser, damage)
            problem: TrainerError | None = None
            try:
                checkpoint = open_checkpoint(path, self._files)
                report = fill(checkpoint, read_places(checkpoint), live(checkpoint), verify=verify)
            except TrainerError as error:
                problem = error
            try:
                self._agree(problem)
                break
            except TrainerError as error:
                damage = error
        folder = self._folder
        if folder is not None and path.resolve() == folder.iteration(checkpoint.iteration).resolve():
            self._present[checkpoint.iteration] = checkpoint.has_optimizer
            self._pinned.add(checkpoint.iteration)
        return checkpoint, report

    def rewind(self, iteration: int) -> None:
        """Rename checkpoints newer than `iteration`, which this run overtakes, out of the way."""
        self._present = {found: has for found, has in self._present.items() if found <= iteration}
        problem: TrainerError | None = None
        if self._board.rank == 0 and self._folder is not None:
            try:
                newer = [found for found in self._folder.committed() if found > iteration]
                for path in self._folder.supersede(newer):
                    _log.info("an abandoned branch of this run is kept as %s", path.name)
            except OSError as error:
                problem = _cannot_write(self._folder.root, error)
        self._agree(problem)

    def abandon(self) -> None:
        """Let go of the lock without waiting for anything: this process is about to end."""
        if self._lock is not None:
            self._lock.release()

    def close(self) -> None:
        """End the background thread and let go of the lock."""
        self._worker.close(self._policy.commit_timeout_s)
        self.abandon()

    def _pick(self, chooser: choose.Chooser, damage: TrainerError | None) -> Path:
        """Return the next candidate on every rank; `damage` is what any rank found wrong with the last one."""
        problem: TrainerError | None = None
        path = ""
        if self._board.rank == 0:
            try:
                if damage is not None:
                    chooser.skip(damage)
                path = str(chooser.pick())
            except TrainerError as error:
                problem = error
        self._agree(problem)
        self._agreements += 1
        data = self._board.from_rank0(f"pick/{self._nonce}/{self._agreements}", path.encode())
        return Path(data.decode())

    def _agree(self, problem: TrainerError | None) -> None:
        self._agreements += 1
        self._board.agree(f"agree/{self._nonce}/{self._agreements}", problem)

    def _attempt(self, attempt: Attempt, contents: Contents, *, pieces: list[Piece], snapshot: Snapshot) -> list[int]:
        """Write, check, commit, then delete what may go. Runs on the worker thread of every rank.

        Returns:
            The iterations that are no longer there, as rank 0 decided it.
        """
        folder = attempt.folder
        partial = folder.partial(attempt.iteration, attempt.name)
        writer = Writer(partial, self._files, attempt.layout, self._board.rank)

        def publish(written: list[WrittenPiece]) -> list[int]:
            documents, aliases = contents.documents, contents.aliases
            commit.publish(attempt, written, documents=documents, aliases=aliases, lock=self._lock)
            return self._doomed(attempt)[0]

        def work() -> list[WrittenPiece]:
            if self._board.rank == 0:
                _require_room(folder, attempt.layout)
            written = writer.write(pieces, snapshot)
            snapshot.check()
            return written

        try:
            doomed = commit.exchange(self._worker_board, attempt, work=work, publish=publish)
        except BaseException:
            if self._board.rank == 0:
                try:
                    self._files.remove_tree(partial)
                except OSError as error:
                    _log.error("%s could not be removed, the next start sweeps it: %s", partial, error)
            raise
        if doomed is None:  # the verdict was lost: what rank 0 has deleted is gone, the rest it decides like this
            doomed, committed = self._doomed(attempt)
            return [*doomed, *(iteration for iteration in self._present if iteration not in committed)]
        if self._board.rank == 0:
            self._delete(doomed, attempt)
        return doomed

    def _doomed(self, attempt: Attempt) -> tuple[list[int], list[int]]:
        """Return what retention gives up now that `attempt` is committed, and all that is committed."""
        try:
            committed = attempt.folder.committed()
        except OSError as error:
            _log.error("%s cannot be listed, nothing is deleted: %s", attempt.folder.root, error)
            return [], []
        return self._policy.retention.doomed(committed, pinned=self._pinned | {attempt.iteration}), committed

    def _delete(self, iterations: list[int], attempt: Attempt) -> None:
        for iteration in iterations:
            try:
                self._files.remove_tree(attempt.folder.discard(iteration, attempt.name))
            except OSError as error:
                _log.error("iteration %d could not be deleted: %s", iteration, error)


def plan(live: Sequence[LiveTensor], layout: Layout, rank: int) -> list[Piece]:
    """Return the pieces that `rank` writes."""
    holdings = []
    for tensor in live:
        if tensor.is_copy:
            continue
        spec = tensor.spec
        box_image = image(tensor.box, spec.view, spec.dtype.itemsize)
        holdings.append(Holding(spec.name, box_image, layout.places[spec.name].offset, tensor.replicas))
    return pieces_of(holdings, rank)


def _require_room(folder: CheckpointFolder, layout: Layout) -> None:
    try:
        free = folder.files.free_bytes(folder.root)
    except OSError as error:
        raise _cannot_write(folder.root, error) from error
    if free < layout.total_bytes:
        raise CheckpointError(
            "There is no room for a checkpoint",
            where=folder.root,
            expected=f"{layout.total_bytes} B free",
            found=f"{free} B",
            fix="Make room, or lower checkpoint.max_checkpoint_keep.",
        )


def _cannot_write(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint folder cannot be written: {error.strerror} (errno {error.errno})",
        where=error.filename or path,
        fix="Mend the file system, or name another folder with checkpoint.save.",
    )
