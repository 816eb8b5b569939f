"""Chooses the checkpoint to load: one iteration folder, or the newest valid one of a run. Rank 0 only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.format.names import MANIFEST
from trainer.checkpoint.loading.reader import (
    Checkpoint,
    check_first_blocks,
    misleading_files,
    open_checkpoint,
    read_places,
)
from trainer.checkpoint.storage.files import Files
from trainer.checkpoint.storage.folder import CheckpointFolder, is_iteration_name, kind_of
from trainer.checkpoint.storage.patience import Patience, unreadable
from trainer.errors import CheckpointError, MismatchError, TrainerError, UnreadableError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadSource:
    """The folder to load from: a run's checkpoint folder, optionally with an `iteration`, or one iteration folder."""

    path: Path
    iteration: int | None = None

    @staticmethod
    def named(path: Path) -> LoadSource:
        """Return the source that a user means by a path, which may be the run's own folder."""
        inner = path / "checkpoints"
        return LoadSource(inner if inner.is_dir() else path)


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
                "The newest iteration of a run is no folder of its own",
                where=path,
                expected="a folder",
                found=kind_of(path),
                fix="Put the folder itself there, or remove the link; or name its target in checkpoint.load.",
            )
        _log.warning("%s is %s and no checkpoint of this run: it is left alone", path, kind_of(path))
    return committed


class Chooser:
    """Offers the candidates of a source, newest first, each checked as far as possible without reading its tensors.

    Args:
        check: raises MismatchError for a valid checkpoint of another run, before any tensor file is opened.
        patience: how long listing the folder is retried; not at all by default.

    Attributes:
        digest: manifest digest of the checkpoint picked last.
    """

    def __init__(
        self, source: LoadSource, files: Files, check: Callable[[Checkpoint], None], *, patience: Patience | None = None
    ) -> None:
        self._source, self._files, self._check = source, files, check
        self._patience = patience or Patience(0.0)
        self._candidates: list[Path] | None = None
        self._is_exact = False
        self._skipped: list[str] = []
        self.digest = ""

    def pick(self) -> Path:
        """Return the newest valid candidate.

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
            try:
                checkpoint = open_checkpoint(path, self._files)
                self._check(checkpoint)
                check_first_blocks(checkpoint, read_places(checkpoint))
            except (MismatchError, UnreadableError):
                raise
            except TrainerError as error:
                self.skip(error)
                continue
            self.digest = checkpoint.digest
            for name in misleading_files(checkpoint):
                _log.warning(
                    "%s is no file of the checkpoint, but transformers would read it: move it away", path / name
                )
            return path
        raise CheckpointError(
            "No valid checkpoint is left",
            where=self._source.path,
            found="; ".join(self._skipped) or "none",
            fix="Mend one, or start afresh with checkpoint.load=none.",
        )

    def skip(self, error: TrainerError) -> None:
        """Remove the candidate picked last from the list because of `error`.

        Raises:
            TrainerError: `error` itself if it is a mismatch, if it proves nothing about the checkpoint, or if the user
                named this iteration: there is no substitute then.
        """
        if self._is_exact or isinstance(error, (MismatchError, UnreadableError)):
            raise error
        if self._candidates:
            path = self._candidates.pop(0)
            _log.error("%s is damaged and skipped: %s", path.name, error)
            self._skipped.append(f"{path.name}: {str(error).rstrip('.')}")

    def _find(self) -> list[Path]:
        path = self._source.path
        if not path.is_dir():
            raise no_folder(path, kind="checkpoint folder", fix="Correct the path, or checkpoint.load.")
        if (path / MANIFEST).exists() or is_iteration_name(path.name):
            if self._source.iteration is not None:
                raise CheckpointError(
                    "An iteration is asked of a folder that is one iteration itself",
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
                fix="Correct the path, or checkpoint.load.",
            )
        return [folder.iteration(iteration) for iteration in reversed(committed)]

    def _exactly(self, folder: CheckpointFolder, iteration: int) -> list[Path]:
        committed, path = folder.committed(), folder.iteration(iteration)
        if iteration in folder.non_folders():
            raise CheckpointError(
                "An iteration is no folder of its own",
                where=path,
                expected="one of " + (", ".join(map(str, committed)) or "none"),
                found=kind_of(path),
                fix="Put the folder itself there, or name the link's target in checkpoint.load.",
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
