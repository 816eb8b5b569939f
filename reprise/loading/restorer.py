"""Restores a run's state: rank 0 picks a checkpoint, all ranks open it and fill their live tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from reprise.commit import replicas
from reprise.errors import LaunchError, MismatchError, PartialLoadError, TrainerError, UnreadableError
from reprise.format.layout import TensorKind
from reprise.loading.block_reader import Progress
from reprise.loading.choose import Chooser, LoadSource, LocalFolders
from reprise.loading.loader import LoadReport, fill, touched_pieces, verify_blocks
from reprise.loading.reader import Checkpoint, tensor_bytes
from reprise.loading.same_checkpoint import open_same
from reprise.loading.verify import verify_share
from reprise.ranks.channel import StoreChannel
from reprise.ranks.error_message import as_problem
from reprise.storage.files import FILE_SYSTEM, Files, T
from reprise.storage.patience import Patience, PatientFiles
from reprise.storage.progress_line import ProgressLine
from reprise.stores.locations import files_of, location
from reprise.tensors.live import LiveTensor

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """The source checkpoint of a restored run.

    Args:
        loaded_from: In words, where a local checkpoint's bytes came from. Empty for a shared checkpoint.
        is_verified: Whether the digests of all its blocks were checked.
    """

    checkpoint: Checkpoint
    report: LoadReport
    is_verified: bool
    loaded_from: str = ""


class Restorer:
    """A run's loads, on a single rank. All ranks make the same calls in the same order, on the main thread.

    Args:
        nonce: This launch's random name, equal on all ranks. Message keys contain it.
        patience: How long to retry a failed read.
        local: The hosts' local checkpoints. None without local checkpoints.
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
        """Fill live tensors from the newest valid checkpoint in `source`. All ranks load the same checkpoint.

        All ranks verify every block before any live byte changes. The second read mostly comes from the page cache or,
        for a store, from the host's cache. No save may be using these tensors.

        Args:
            check: Refuses another run's checkpoint before any tensor is read. Called on rank 0 only.
            live: Returns the tensors to fill, given the checkpoint. Called on all ranks.
            verify: Whether to check the digests of all blocks read.
            verify_all: Whether to check the digests of all blocks in the checkpoint first, divided among the ranks.
            with_local: Whether local checkpoints are candidates too.
            is_new: Whether nobody keeps the tensors after a failed load: a single read can then verify and fill them.
            finish: Changes the other state once all tensors are filled. An interrupt causes a second call.

        Raises:
            PartialLoadError: The load failed after the first live byte changed. Every rank raises.
            UnreadableError: A rank cannot read the checkpoint now, or does not see it. Every rank raises.
            CheckpointError: No checkpoint can be loaded. Damaged checkpoints are logged and skipped, unless the source
                names an iteration. Every rank raises.
            MismatchError: A rank finds another checkpoint under the path than rank 0. Every rank raises.
        """
        shared_load = self._key("store").replace("/", "-") if self._channel.world_size > 1 or not is_new else None
        files = PatientFiles(files_of(source.path, self._system, load=shared_load), self._patience)
        chooser = Chooser(source, files, check, patience=self._patience, local=self._local if with_local else None)

        def prepare(checkpoint: Checkpoint) -> tuple[Sequence[LiveTensor], LoadReport]:
            if verify_all:
                self._verify(checkpoint)
            tensors = live(checkpoint)
            new = [tensor for tensor in tensors if is_new or tensor.is_new]
            report = _fill(checkpoint, new, verify=verify)
            if verify and not is_new:
                old = _held(tensors)
                verify_blocks(checkpoint, old, _progress("verifying", checkpoint, old))
            return tensors, report

        try:
            checkpoint, loaded_from, (tensors, report) = self._prepared(chooser, files, check, live, prepare)
            if is_new:
                self.check_replicas(tensors)
            else:
                report += self._change(partial(_fill, checkpoint, _held(tensors), verify=verify), finish, tensors)
        finally:
            files.end()
        is_all_read = not checkpoint.has_optimizer or any(
            tensor.spec.kind is TensorKind.OPTIMIZER for tensor in tensors
        )
        return Restored(checkpoint, report, verify_all or (verify and is_all_read), loaded_from)

    def _prepared(
        self,
        chooser: Chooser,
        files: Files,
        check: Callable[[Checkpoint], None],
        live: Callable[[Checkpoint], Sequence[LiveTensor]],
        prepare: Callable[[Checkpoint], T],
    ) -> tuple[Checkpoint, str, T]:
        """Return the first candidate prepared by every rank, its bytes' origin, and the result of `prepare`."""
        damage: TrainerError | None = None
        loaded_from = ""
        while True:
            pick = partial(_pick_next, chooser, damage, is_complete=bool(loaded_from))
            name, is_local, digest = self._channel.from_first(self._key("pick"), pick)
            problem = None
            path = self._local.here(name) if is_local and self._local else location(name)
            try:
                if not digest:  # the hosts must complete a local checkpoint
                    damage, loaded_from = None, self._complete(path, check, live)
                    continue
                try:
                    # Rank 0 has it open. Another rank opens it once it is visible there.
                    checkpoint = chooser.checkpoint or open_same(path, digest, files, reader=self._channel.coordinator)
                    prepared = prepare(checkpoint)
                except TrainerError as error:
                    problem = error
                self._channel.agree(self._key("agree"), problem)
                return checkpoint, loaded_from if chooser.is_local(path) else "", prepared
            except TrainerError as error:
                if digest and isinstance(error, LaunchError):  # a lost rank proves nothing about the checkpoint
                    raise
                damage, loaded_from = None if self._heal(path, error) else error, ""

    def _change(
        self, fill_held: Callable[[], LoadReport], finish: Callable[[], None], tensors: Sequence[LiveTensor]
    ) -> LoadReport:
        """Change live state, as all ranks have decided, and return the report for its tensors.

        This rank awaits no message before it has changed all its state.
        """
        problem: TrainerError | None = None
        report: LoadReport | None = None

        def change() -> None:
            nonlocal report
            report = fill_held()
            finish()

        try:
            try:
                _complete_change(change)
            except TrainerError as error:
                problem = error
            self._channel.agree(self._key("agree"), problem)
            self.check_replicas(tensors)
        except TrainerError as error:
            raise PartialLoadError(
                "The load failed partway",
                found=error,
                fix="Some tensors and values may already have changed: load again on all ranks, or rebuild the "
                "objects.",
            ) from error
        assert report is not None
        return report

    def check_replicas(self, live: Sequence[LiveTensor]) -> None:
        """Compare live tensors' bits between their ranks. Collective.

        Raises:
            CheckpointError: A tensor differs; names the first. Every rank raises, rank 0 a ReplicaError.
        """
        replicas.check_replicas(live, self._channel, self._key("replicas"))

    def _complete(
        self,
        path: Path,
        check: Callable[[Checkpoint], None],
        live: Callable[[Checkpoint], Sequence[LiveTensor]],
    ) -> str:
        """Fetch to every host the local checkpoint's pieces for its ranks, and return where they came from."""
        assert self._local is not None
        return self._local.complete(path, check, lambda found: touched_pieces(found, live(found)))

    def _heal(self, path: Path, error: TrainerError) -> bool:
        """Return whether hosts discarded damaged pieces of a local checkpoint, which others may have intact.

        Ranks may have different errors. Rank 0's decides, and all ranks make the same calls.
        """
        if self._local is None or not self._local.owns(path):
            return False
        may_heal = not isinstance(error, (LaunchError, MismatchError, UnreadableError))
        return self._channel.from_first(self._key("heal"), lambda: may_heal) and self._local.heal(path)

    def _verify(self, checkpoint: Checkpoint) -> None:
        rank, world_size = self._channel.ranks.index(self._channel.rank), self._channel.world_size
        if checkpoint.host and self._local:
            rank, world_size = self._local.share
        line = ProgressLine(f"verifying iteration {checkpoint.iteration}", tensor_bytes(checkpoint) // world_size)
        checked = verify_share(checkpoint, rank=rank, world_size=world_size, progress=line.at)
        _log.info("verified %d bytes of iteration %d on this rank", checked, checkpoint.iteration)

    def _key(self, kind: str) -> str:
        """Return an unused key."""
        self._messages += 1
        return f"load/{self._nonce}/{self._messages}/{kind}"


def _fill(checkpoint: Checkpoint, tensors: Sequence[LiveTensor], *, verify: bool) -> LoadReport:
    return fill(checkpoint, tensors, verify=verify, progress=_progress("loading", checkpoint, tensors))


def _progress(what: str, checkpoint: Checkpoint, tensors: Sequence[LiveTensor]) -> Progress:
    """Return a progress callback for reading tensors, which logs a load at most every few seconds."""
    total_bytes = sum(tensor.local.nbytes for tensor in tensors)
    return ProgressLine(f"{what} iteration {checkpoint.iteration}", total_bytes).at


def _held(tensors: Sequence[LiveTensor]) -> list[LiveTensor]:
    """Return the tensors visible to the caller during the load."""
    return [tensor for tensor in tensors if not tensor.is_new]


def _complete_change(change: Callable[[], None]) -> None:
    """Complete a change despite an interrupt: repeat it to its end, then raise the interrupt.

    A second interrupt ends it at once.

    Raises:
        TrainerError: The change fails.
    """
    try:
        change()
    except TrainerError:
        raise
    except BaseException as error:  # Ctrl-C, or anything a signal handler raises
        _log.warning("interrupted while restoring state: the load finishes first; interrupt again to stop now")
        try:
            change()
        except Exception as failure:  # noqa: BLE001 - every rank hears of it
            raise as_problem(failure) from error
        raise


def _pick_next(chooser: Chooser, damage: TrainerError | None, *, is_complete: bool) -> list[object]:
    """Pick the next candidate, after skipping the last candidate if it is damaged.

    Returns:
        Its path, or a local checkpoint's folder name, as hosts may keep them under other paths. Whether it is local.
        Its digest, or an empty string if the hosts must complete it.
    """
    if damage is not None:
        chooser.skip(damage)
    path = chooser.pick(is_complete=is_complete)
    is_local = chooser.is_local(path)
    digest = "" if chooser.checkpoint is None else chooser.checkpoint.digest
    return [path.name if is_local else str(path), is_local, digest]
