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
from reprise.loading.blocks import Progress
from reprise.loading.choose import Chooser, LoadSource, LocalFolders
from reprise.loading.loader import fill, touched_pieces, verify_blocks
from reprise.loading.reader import Checkpoint
from reprise.ranks.channel import StoreChannel
from reprise.ranks.error_message import as_problem
from reprise.storage.files import FILE_SYSTEM, Files, T
from reprise.storage.patience import with_retries
from reprise.storage.progress_line import log_progress
from reprise.stores.locations import files_of, location
from reprise.tensors.live import LiveTensor

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """The source checkpoint of a restored run.

    Args:
        is_verified: Whether the digests of all its blocks were checked: it was not loaded without its optimizer state.
        loaded_from: In words, where a local checkpoint's bytes came from. Empty for a shared checkpoint.
    """

    checkpoint: Checkpoint
    is_verified: bool
    loaded_from: str = ""


class Restorer:
    """A run's loads, on a single rank. All ranks make the same calls in the same order, on the main thread.

    Args:
        nonce: This launch's random name, equal on all ranks. Message keys contain it.
    """

    def __init__(self, channel: StoreChannel, *, nonce: str, files: Files | None = None) -> None:
        self._channel, self._nonce = channel, nonce
        self._system = files or FILE_SYSTEM
        self._messages = 0

    def restore(
        self,
        source: LoadSource,
        *,
        check: Callable[[Checkpoint], None],
        live: Callable[[Checkpoint], Sequence[LiveTensor]],
        is_new: bool = False,
        finish: Callable[[], None] = lambda: None,
    ) -> Restored:
        """Fill live tensors from the newest valid checkpoint in `source`. All ranks load the same checkpoint.

        All ranks verify every block before any live byte changes. The second read mostly comes from the page cache or,
        for a store, from the host's cache. No save may be using these tensors.

        Args:
            check: Refuses another run's checkpoint before any tensor is read. Called on rank 0 only.
            live: Returns the tensors to fill, given the checkpoint. Called on all ranks.
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
        files = with_retries(files_of(source.path, self._system, load=shared_load))

        def prepare(checkpoint: Checkpoint) -> Sequence[LiveTensor]:
            tensors = live(checkpoint)
            _fill(checkpoint, [tensor for tensor in tensors if is_new or tensor.is_new])
            if not is_new:
                old = _held(tensors)
                verify_blocks(checkpoint, old, _progress("verifying", checkpoint, old))
            return tensors

        try:
            checkpoint, loaded_from, tensors = self._prepared(source, files, check, live, prepare)
            if is_new:
                self.check_replicas(tensors)
            else:
                self._change(partial(_fill, checkpoint, _held(tensors)), finish, tensors)
        finally:
            files.end()
        kinds = {tensor.spec.kind for tensor in tensors}
        is_verified = not checkpoint.has_optimizer or TensorKind.OPTIMIZER in kinds
        return Restored(checkpoint, is_verified, loaded_from)

    def _prepared(
        self,
        source: LoadSource,
        files: Files,
        check: Callable[[Checkpoint], None],
        live: Callable[[Checkpoint], Sequence[LiveTensor]],
        prepare: Callable[[Checkpoint], T],
    ) -> tuple[Checkpoint, str, T]:
        """Return the first candidate prepared by every rank, its bytes' origin, and the result of `prepare`."""
        chooser = Chooser(source, files, check)
        damage: TrainerError | None = None

        def pick() -> tuple[str, str]:
            """Return a candidate's path and digest; for a local one its folder name alone, as hosts' roots differ."""
            path = chooser.pick(damage)
            return (path.name, "") if chooser.checkpoint is None else (str(path), chooser.checkpoint.digest)

        while True:
            name, digest = self._channel.from_first(self._key("pick"), pick)
            path, loaded_from, local = location(name), "", None if digest else source.local
            problem: TrainerError | None = None
            try:
                if local is not None:
                    path = local.folder.root / name
                    digest, loaded_from = local.complete(path, check, lambda found: touched_pieces(found, live(found)))
                try:
                    checkpoint = chooser.open_picked(path, digest, by_rank=self._channel.coordinator)
                    prepared = prepare(checkpoint)
                except TrainerError as error:
                    problem = error
                self._channel.agree(self._key("agree"), problem)
                return checkpoint, loaded_from, prepared
            except TrainerError as error:
                if digest and isinstance(error, LaunchError):  # a lost rank proves nothing about the checkpoint
                    raise
                damage = None if local is not None and self._heal(local, path, error) else error

    def _change(self, fill_held: Callable[[], None], finish: Callable[[], None], tensors: Sequence[LiveTensor]) -> None:
        """Change live state, as all ranks have decided.

        This rank awaits no message before it has changed all its state.
        """
        problem: TrainerError | None = None

        def change() -> None:
            fill_held()
            finish()

        try:
            try:
                _complete_change(change)
            except TrainerError as error:
                problem = error
            self.check_replicas(tensors, problem)
        except TrainerError as error:
            raise PartialLoadError(
                "The load failed partway",
                found=error,
                fix="Some tensors and values may already have changed: load again on all ranks, or rebuild the "
                "objects.",
            ) from error

    def check_replicas(self, live: Sequence[LiveTensor], problem: TrainerError | None = None) -> None:
        """Compare live tensors' bits between their ranks, unless a rank has a problem with its tensors. Collective.

        Raises:
            CheckpointError: A tensor differs; names the first. Every rank raises, rank 0 a ReplicaError.
            TrainerError: A rank has a problem; see `StoreChannel.agree`.
        """
        replicas.check_replicas(live, self._channel, self._key("replicas"), problem=problem)

    def _heal(self, local: LocalFolders, path: Path, error: TrainerError) -> bool:
        """Return whether hosts discarded damaged pieces of a local checkpoint, which others may have intact.

        Ranks may have different errors. Rank 0's decides, and all ranks make the same calls.
        """
        may_heal = not isinstance(error, (LaunchError, MismatchError, UnreadableError))
        return self._channel.from_first(self._key("heal"), lambda: may_heal) and local.heal(path)

    def _key(self, kind: str) -> str:
        """Return an unused key."""
        self._messages += 1
        return f"load/{self._nonce}/{self._messages}/{kind}"


def _fill(checkpoint: Checkpoint, tensors: Sequence[LiveTensor]) -> None:
    fill(checkpoint, tensors, progress=_progress("loading", checkpoint, tensors))


def _progress(what: str, checkpoint: Checkpoint, tensors: Sequence[LiveTensor]) -> Progress:
    """Return a progress callback for reading tensors, which logs a load at most every few seconds."""
    total_bytes = sum(tensor.local.nbytes for tensor in tensors)
    return log_progress(f"{what} iteration {checkpoint.iteration}", total_bytes)


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
