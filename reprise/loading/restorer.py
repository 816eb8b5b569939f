"""Restores the state of a run: rank 0 picks a checkpoint, all ranks open it and fill their live tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from reprise.commit import replicas
from reprise.errors import LaunchError, MismatchError, PartialLoadError, TrainerError, UnreadableError
from reprise.format.host_file import PieceNumbers
from reprise.format.layout import TensorKind
from reprise.format.names import MANIFEST
from reprise.loading.block_reader import Progress
from reprise.loading.choose import Chooser, LoadSource, LocalFolders
from reprise.loading.loader import LoadReport, fill, touched_pieces, verify_blocks
from reprise.loading.reader import Checkpoint, read_places
from reprise.loading.same_checkpoint import open_same
from reprise.loading.verify import verify_share
from reprise.ranks.channel import StoreChannel
from reprise.ranks.error_message import as_problem
from reprise.storage.files import FILE_SYSTEM, Files, T
from reprise.storage.patience import Patience, PatientFiles, await_sight
from reprise.storage.progress_line import ProgressLine
from reprise.stores.locations import files_of, location
from reprise.tensors.live import LiveTensor

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """The source checkpoint of a restored run.

    Args:
        loaded_from: in words, where the bytes of a local checkpoint came from; empty for a shared checkpoint.
        is_verified: whether the digests of all its blocks were checked.
        damaged: on rank 0, the iterations skipped for their damage.
    """

    checkpoint: Checkpoint
    report: LoadReport
    is_verified: bool
    loaded_from: str = ""
    damaged: frozenset[int] = frozenset()


class Restorer:
    """The loads of a run, on a single rank. All ranks make the same calls in the same order, on the main thread.

    Args:
        nonce: a name of this run of the program, equal on all ranks; messages are named after it.
        patience: for how long a failed read is tried again.
        local: the local checkpoints of the hosts; None for none.
    """

    def __init__(
        self,
        channel: StoreChannel,
        *,
        nonce: str,
        files: Files | None = None,
        patience: Patience | None = None,
        local: LocalFolders | None = None,
    ) -> None:
        self._local = local
        self._channel, self._nonce = channel, nonce
        self._patience = patience or Patience()
        self._system = files or FILE_SYSTEM
        self._files = PatientFiles(self._system, self._patience)
        self._messages = 0

    def restore(
        self,
        source: LoadSource,
        *,
        check: Callable[[Checkpoint], None],
        live: Callable[[Checkpoint], Sequence[LiveTensor]],
        verify: bool = True,
        verify_all: bool = False,
        with_local: bool = False,
        is_new: bool = False,
        finish: Callable[[], None] = lambda: None,
    ) -> Restored:
        """Fill live tensors from the newest valid checkpoint of `source`; all ranks load the same one.

        Every block is verified on all ranks before a live byte changes; the second read mostly comes from the page
        cache, and of a store from the host's. No save of these tensors may be under way.

        Args:
            check: refuses a checkpoint of another run before any tensor is read; rank 0 only.
            live: the tensors to fill, given the checkpoint; all ranks.
            verify: check the digests of all blocks read.
            verify_all: before that, check those of all blocks of the checkpoint, shared out between the ranks.
            with_local: whether local checkpoints are candidates as well.
            is_new: whether nobody keeps the tensors of a failed load: one read verifies and fills them.
            finish: changes the rest of the state once all tensors are filled; an interrupt leads to a second call.

        Raises:
            PartialLoadError: on every rank, if the load fails after the first live byte has changed.
            UnreadableError: on every rank, if a rank cannot read the checkpoint now, or does not see it.
            CheckpointError: on every rank, if none can be loaded; damaged checkpoints are logged and skipped, unless
                named exactly.
            MismatchError: on every rank, if a rank finds another checkpoint under the path than rank 0.
        """
        local = self._local if with_local else None
        shared_load = self._key("store").replace("/", "-") if self._channel.world_size > 1 or not is_new else None
        self._files = PatientFiles(files_of(source.path, self._system, load=shared_load), self._patience)
        chooser = Chooser(source, self._files, check, patience=self._patience, local=local)

        def prepare(checkpoint: Checkpoint) -> tuple[Sequence[LiveTensor], LoadReport]:
            if verify_all:
                self._verify(checkpoint)
            tensors = live(checkpoint)
            new = [tensor for tensor in tensors if is_new or tensor.is_new]
            report = self._fill(checkpoint, new, verify=verify)
            if verify and not is_new:
                self._verify_blocks(checkpoint, _held(tensors))
            return tensors, report

        try:
            checkpoint, loaded_from, (tensors, report) = self._prepared(chooser, check, live, prepare)
            if is_new:
                self.check_replicas(tensors)
            else:
                report += self._change(partial(self._fill, checkpoint, _held(tensors), verify=verify), finish, tensors)
        finally:
            self._files.end()
        is_all_read = not checkpoint.has_optimizer or any(
            tensor.spec.kind is TensorKind.OPTIMIZER for tensor in tensors
        )
        return Restored(checkpoint, report, verify_all or (verify and is_all_read), loaded_from, chooser.damaged)

    def _prepared(
        self,
        chooser: Chooser,
        check: Callable[[Checkpoint], None],
        live: Callable[[Checkpoint], Sequence[LiveTensor]],
        prepare: Callable[[Checkpoint], T],
    ) -> tuple[Checkpoint, str, T]:
        """Return the first candidate prepared by every rank, the origin of its bytes, and the result of `prepare`."""
        damage: TrainerError | None = None
        loaded_from = ""
        while True:
            pick = partial(_picked, chooser, damage, is_complete=bool(loaded_from))
            name, digest = self._channel.from_first(self._key("pick"), pick)
            path, problem = location(name), None
            try:
                if not digest:  # a local checkpoint, which the hosts have to complete
                    damage, loaded_from = None, self._complete(path, check, live)
                    continue
                try:
                    checkpoint = self._open(chooser, path, digest)
                    prepared = prepare(checkpoint)
                except TrainerError as error:
                    problem = error
                self._agree(problem)
                return checkpoint, loaded_from if self._is_local(path) else "", prepared
            except TrainerError as error:
                if digest and isinstance(error, LaunchError):  # a lost rank says nothing of the checkpoint
                    raise
                damage, loaded_from = None if self._heal(path, error) else error, ""

    def _change(
        self, fill_held: Callable[[], LoadReport], finish: Callable[[], None], tensors: Sequence[LiveTensor]
    ) -> LoadReport:
        """Change live state, as all ranks have decided, and return the report of its tensors.

        No message is awaited before all of it has changed on this rank.
        """
        problem: TrainerError | None = None
        report: LoadReport | None = None

        def change() -> None:
            nonlocal report
            report = fill_held()
            finish()

        try:
            try:
                _make_whole(change)
            except TrainerError as error:
                problem = error
            self._agree(problem)
            self.check_replicas(tensors)
        except TrainerError as error:
            raise PartialLoadError(
                "A load failed after it had begun to change the tensors and values that it was given",
                found=error,
                fix="Load again on all ranks, or build them anew: they may hold parts of two states.",
            ) from error
        assert report is not None
        return report

    def _open(self, chooser: Chooser, path: Path, digest: str) -> Checkpoint:
        """Return the checkpoint that rank 0 has chosen and opened; another rank opens it once it is visible there."""
        if self._channel.coordinates and chooser.checkpoint is not None:
            return chooser.checkpoint
        reader = self._channel.coordinator
        await_sight(path / MANIFEST, self._patience, self._files, rank=self._channel.rank, reader=reader)
        return open_same(path, digest, self._files, reader=reader)

    def check_replicas(self, live: Sequence[LiveTensor]) -> None:
        """Compare the bits of live tensors between their ranks. A call of all ranks.

        Raises:
            CheckpointError: on every rank, a ReplicaError on rank 0, naming the first different tensor.
        """
        replicas.check_replicas(live, self._channel, self._key("replicas"))

    def _complete(
        self,
        path: Path,
        check: Callable[[Checkpoint], None],
        live: Callable[[Checkpoint], Sequence[LiveTensor]],
    ) -> str:
        """Bring to every host what its ranks read of a local checkpoint, and return where it came from."""
        assert self._local is not None

        def wanted(checkpoint: Checkpoint) -> PieceNumbers:
            return touched_pieces(checkpoint, read_places(checkpoint), live(checkpoint))

        return self._local.complete(path, check, wanted)

    def _is_local(self, path: Path) -> bool:
        return self._local is not None and self._local.owns(path)

    def _heal(self, path: Path, error: TrainerError) -> bool:
        """Return whether hosts gave up damaged pieces of a local checkpoint, which others may have.

        Each rank has an error of its own kind; rank 0's decides: all then make the same calls.
        """
        if self._local is None or not self._is_local(path):
            return False
        may_heal = not isinstance(error, (LaunchError, MismatchError, UnreadableError))
        return self._channel.from_first(self._key("heal"), lambda: may_heal) and self._local.heal(path)

    def _verify(self, checkpoint: Checkpoint) -> None:
        rank, world_size = self._channel.ranks.index(self._channel.rank), self._channel.world_size
        if checkpoint.host is not None and self._local is not None:
            rank, world_size = self._local.share
        places = read_places(checkpoint)
        share = sum(place.spec.total_bytes for place in places.values()) // world_size
        line = ProgressLine(f"verifying iteration {checkpoint.iteration}", share)
        threads = self._files.reading_threads
        checked = verify_share(checkpoint, places, rank=rank, world_size=world_size, threads=threads, progress=line.at)
        _log.info("verified %d bytes of iteration %d on this rank", checked, checkpoint.iteration)

    def _fill(self, checkpoint: Checkpoint, tensors: Sequence[LiveTensor], *, verify: bool) -> LoadReport:
        return fill(
            checkpoint,
            read_places(checkpoint),
            tensors,
            verify=verify,
            threads=self._files.reading_threads,
            progress=self._progress("loading", checkpoint, tensors),
        )

    def _verify_blocks(self, checkpoint: Checkpoint, tensors: Sequence[LiveTensor]) -> None:
        progress, places = self._progress("verifying", checkpoint, tensors), read_places(checkpoint)
        verify_blocks(checkpoint, places, tensors, threads=self._files.reading_threads, progress=progress)

    def _progress(self, what: str, checkpoint: Checkpoint, tensors: Sequence[LiveTensor]) -> Progress:
        """Return the progress of reading tensors, logged by a load of more than a second."""
        total_bytes = sum(tensor.local.nbytes for tensor in tensors)
        return ProgressLine(f"{what} iteration {checkpoint.iteration}", total_bytes).at

    def _agree(self, problem: TrainerError | None) -> None:
        self._channel.agree(self._key("agree"), problem)

    def _key(self, kind: str) -> str:
        """Return an unused key."""
        self._messages += 1
        return f"load/{self._nonce}/{self._messages}/{kind}"


def _held(tensors: Sequence[LiveTensor]) -> list[LiveTensor]:
    """Return the tensors that the caller sees during the load."""
    return [tensor for tensor in tensors if not tensor.is_new]


def _make_whole(change: Callable[[], None]) -> None:
    """Make a change that an interrupt must not cut: it is made again, to its end, before the interrupt goes on.

    A second interrupt ends it at once.

    Raises:
        TrainerError: if the change fails.
    """
    try:
        change()
    except TrainerError:
        raise
    except BaseException as error:  # Ctrl-C, or whatever the handler of a signal raises
        _log.warning("interrupted while state changes: the load is completed first, unless interrupted again")
        try:
            change()
        except Exception as failure:  # noqa: BLE001 - every rank hears of it
            raise as_problem(failure) from error
        raise


def _picked(chooser: Chooser, damage: TrainerError | None, *, is_complete: bool) -> list[str]:
    """Return the path and the digest of the next candidate, after skipping the last one for its damage."""
    if damage is not None:
        chooser.skip(damage)
    path = chooser.pick(is_complete=is_complete)
    return [str(path), "" if chooser.checkpoint is None else chooser.checkpoint.digest]
