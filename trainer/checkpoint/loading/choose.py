"""Chooses the checkpoint to load: one iteration folder, or the newest valid one of a run. Rank 0 only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainer.checkpoint.format.host_file import PieceNumbers
from trainer.checkpoint.format.names import MANIFEST
from trainer.checkpoint.loading.reader import (
    Checkpoint,
    check_first_blocks,
    misleading_files,
    open_checkpoint,
    read_places,
)
from trainer.checkpoint.storage.files import Files
from trainer.checkpoint.storage.folder import CheckpointFolder, is_iteration_name, iteration_of, kind_of
from trainer.checkpoint.storage.patience import Patience, unreadable
from trainer.errors import CheckpointError, LaunchError, MismatchError, TrainerError, UnreadableError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadSource:
    """The folder to load from: a run's checkpoint folder, optionally with an `iteration`, or one iteration folder.

    Args:
        key: the configuration key or option that names it, for messages.
    """

    path: Path
    iteration: int | None = None
    key: str = "checkpoint.load"

    @staticmethod
    def named(path: Path, *, key: str = "checkpoint.load") -> LoadSource:
        """Return the source for a path given by a user: a run's own folder, its checkpoint folder or one iteration."""
        inner = path / "checkpoints"
        return LoadSource(inner if inner.is_dir() else path, key=key)


def no_folder(path: Path, *, kind: str = "such folder", fix: str | None = None) -> CheckpointError:
    """Return the error for a path that is missing or is not a folder."""
    if path.exists():
        return CheckpointError("A path is a file where a folder is expected", where=path, fix=fix)
    return CheckpointError(f"There is no {kind}", where=path, fix=fix)


def committed_in(folder: CheckpointFolder) -> list[int]:
    """Return the committed iterations of a run in ascending order; links among them are logged.

    Raises:
        CheckpointError: if the newest name is a link or a file: falling back to an older checkpoint would lose it.
        OSError: if the folder cannot be listed.
    """
    committed = folder.committed()
    for iteration in reversed(folder.non_folders()):
        path = folder.iteration(iteration)
        if iteration > max(committed, default=-1):
            raise CheckpointError(
                "The newest iteration of a run is not a folder",
                where=path,
                expected="a folder",
                found=kind_of(path),
                fix="Replace the link by its target or remove it, or set checkpoint.load to the target.",
            )
        _log.warning("%s is %s, not a checkpoint of this run, and is ignored", path, kind_of(path))
    return committed


class LocalFolders(Protocol):
    """The local checkpoints of the hosts of a run; `local.host_folders.HostFolders` has them."""

    @property
    def share(self) -> tuple[int, int]:
        """Return this rank's number among the ranks of its host, and how many they are."""

    def paths(self, iteration: int | None = None) -> list[tuple[int, Path]]:
        """Return the iterations, newest first, that can be made whole, or the given one if it can. Rank 0 only."""

    def describe_missing(self) -> str:
        """Return in words what the newest one lacks; empty if there is none. Rank 0 only."""

    def owns(self, path: Path) -> bool:
        """Return whether a path is that of a local checkpoint."""

    def complete(
        self, path: Path, check: Callable[[Checkpoint], None], wanted: Callable[[Checkpoint], PieceNumbers]
    ) -> object:
        """Have on every host the pieces that its ranks want, after rank 0's check. Collective."""

    def heal(self, path: Path) -> bool:
        """Give up damaged pieces on every host; return whether there are any. Collective."""


class Chooser:
    """Offers the candidates of a source, newest first, each checked as far as possible without reading its tensors.

    Args:
        check: raises MismatchError for a valid checkpoint of another run, before any tensor file is opened.
        patience: how long listing the folder is retried; no retries by default.
        local: the local checkpoints, candidates beside those of the source; None for none.

    Attributes:
        digest: manifest digest of the checkpoint picked last.
    """

    def __init__(
        self,
        source: LoadSource,
        files: Files,
        check: Callable[[Checkpoint], None],
        *,
        patience: Patience | None = None,
        local: LocalFolders | None = None,
    ) -> None:
        self._local, self._local_paths = local, set[Path]()
        self._source, self._files, self._check = source, files, check
        self._patience = patience or Patience(0.0)
        self._candidates: list[Path] | None = None
        self._is_exact = False
        self._skipped: list[str] = []
        self.digest = ""

    def pick(self, *, is_complete: bool = True) -> Path:
        """Return the newest valid candidate.

        A local one is first returned unopened, with an empty `digest`: the hosts have to complete it.

        Args:
            is_complete: whether they have completed the candidate that was returned last.

        Raises:
            MismatchError: if that one belongs to another run.
            UnreadableError: if it, or the folder, cannot be read at the moment: an older one is no substitute.
            CheckpointError: if there is none, naming the skipped ones and the reasons.
        """
        if self._candidates is None:
            try:
                self._candidates = self._patience.retry(self._find, where=self._source.path)
            except OSError as error:
                raise unreadable(error, where=self._source.path) from error
        while self._candidates:
            path = self._candidates[0]
            if path in self._local_paths and not is_complete:
                self.digest = ""
                return path
            try:
                checkpoint = open_checkpoint(path, self._files)
                self._check(checkpoint)
                check_first_blocks(checkpoint, read_places(checkpoint))
            except (MismatchError, UnreadableError):
                raise
            except TrainerError as error:
                self.skip(error)
                is_complete = False
                continue
            self.digest = checkpoint.digest
            for name in misleading_files(checkpoint):
                _log.warning(
                    "%s is not part of the checkpoint, but transformers would read it: move it away", path / name
                )
            return path
        raise CheckpointError(
            "No valid checkpoint is left",
            where=self._source.path,
            found="; ".join(self._skipped) or "none",
            fix="Repair one, or start from scratch with checkpoint.load=none.",
        )

    def openable(self) -> Iterator[Checkpoint]:
        """Yield every candidate that can be opened, newest first, without a check, a log line or a choice.

        Raises:
            TrainerError: if the folder is not there, or has no checkpoint.
            OSError: if it cannot be listed.
        """
        for path in self._find():
            try:
                yield open_checkpoint(path, self._files)
            except TrainerError:  # `pick` names it
                continue

    def skip(self, error: TrainerError) -> None:
        """Remove the candidate picked last from the list because of `error`.

        Raises:
            TrainerError: `error` itself if it is a mismatch, if it proves nothing about the checkpoint, or if the user
                named this iteration: there is no substitute then.
        """
        is_last = self._is_exact and len(self._candidates or ()) < 2
        if is_last or isinstance(error, (LaunchError, MismatchError, UnreadableError)):
            raise error
        if self._candidates:
            path = self._candidates.pop(0)
            _log.error("%s is damaged and skipped: %s", path.name, error)
            self._skipped.append(f"{path.name}: {str(error).rstrip('.')}")

    def _find(self) -> list[Path]:
        if self._local is None:
            return self._find_shared()
        local = self._local.paths(self._source.iteration)
        self._local_paths = {path for _, path in local}
        folder, wanted = CheckpointFolder(self._source.path, self._files), self._source.iteration
        is_shared = not self._local.owns(folder.iteration(0))
        names = [*folder.committed(), *folder.non_folders()] if is_shared else []
        shared = self._find_shared() if names and (wanted is None or wanted in names or not local) else []
        found = [*local, *((iteration_of(path) or 0, path) for path in shared)]
        if not found:
            raise CheckpointError(
                "No local checkpoint is whole, and no folder that all hosts share has one",
                where=self._source.path,
                found=self._local.describe_missing() or "no local checkpoint",
                fix="Bring back the hosts that have the rest, or start over with checkpoint.load=none.",
            )
        return [path for _, path in sorted(found, key=lambda pair: -pair[0])]  # stable: of two, the local one is first

    def _find_shared(self) -> list[Path]:
        path = self._source.path
        if not path.is_dir():
            raise no_folder(path, kind="checkpoint folder", fix=f"Correct the path, or {self._source.key}.")
        if (path / MANIFEST).exists() or is_iteration_name(path.name):
            if self._source.iteration is not None:
                raise CheckpointError(
                    "An iteration was requested from a folder that is itself one iteration",
                    where=path,
                    found=f"checkpoint.ckpt_step={self._source.iteration}",
                    fix="Leave checkpoint.ckpt_step out, or name the run's checkpoint folder in checkpoint.load.",
                )
            self._is_exact = True
            return [path]
        folder = CheckpointFolder(path, self._files)
        if self._source.iteration is not None:
            return self._exactly(folder, self._source.iteration)
        committed = committed_in(folder)
        if not committed:
            raise CheckpointError(
                "A folder holds no checkpoint",
                where=path,
                expected="an iter_ folder",
                fix=f"Correct the path, or {self._source.key}.",
            )
        return [folder.iteration(iteration) for iteration in reversed(committed)]

    def _exactly(self, folder: CheckpointFolder, iteration: int) -> list[Path]:
        committed, path = folder.committed(), folder.iteration(iteration)
        if iteration in folder.non_folders():
            raise CheckpointError(
                "An iteration is not a folder",
                where=path,
                expected="one of " + (", ".join(map(str, committed)) or "none"),
                found=kind_of(path),
                fix="Replace the link by its target, or set checkpoint.load to the target.",
            )
        if iteration not in committed:
            raise CheckpointError(
                "An iteration was never saved",
                where=path,
                expected="one of " + (", ".join(map(str, committed)) or "none"),
                fix="Correct checkpoint.ckpt_step.",
            )
        self._is_exact = True
        return [path]
