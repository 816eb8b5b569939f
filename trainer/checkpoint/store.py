"""The folder of a run's checkpoints: names, the scan, the tracker, the sweep. It looks into none."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.files import Files, replace_file

_log = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{7,})")
_ANY_ITERATION = re.compile(r"iter_\d{7,}(\.superseded-\d+)?")
_LEFTOVER = re.compile(r"\.iter_\d{7,}\..*\.(partial|deleting)")


def iteration_name(iteration: int) -> str:
    """Return the folder name of an iteration, as Megatron-LM names it."""
    return f"iter_{iteration:07d}"


def iteration_of(path: Path) -> int | None:
    """Return the iteration that a folder's name says it holds, or None if it is no checkpoint."""
    match = _ITERATION.fullmatch(path.name)
    iteration = int(match[1]) if match else None
    return iteration if iteration is not None and iteration_name(iteration) == path.name else None


def is_iteration_name(name: str) -> bool:
    """Return whether a folder's name says that it is one iteration, superseded ones included."""
    return _ANY_ITERATION.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The folder that `checkpoint.save` names. Only rank 0 changes names in it, and only under the lock."""

    root: Path
    files: Files

    def committed(self) -> list[int]:
        """Return the committed iterations in rising order; an empty list if the folder is not there."""
        if not self.root.is_dir():
            return []
        found = (iteration_of(path) for path in self.root.iterdir() if path.is_dir() and not path.is_symlink())
        return sorted(iteration for iteration in found if iteration is not None)

    def iteration(self, iteration: int) -> Path:
        """Return the folder of a committed iteration."""
        return self.root / iteration_name(iteration)

    def partial(self, iteration: int, attempt: str) -> Path:
        """Return the folder in which an attempt writes."""
        return self.root / f".{iteration_name(iteration)}.{attempt}.partial"

    def tracker(self) -> int | None:
        """Return what Megatron's tracker says, a hint only; None if it is missing or unreadable."""
        try:
            return int((self.root / TRACKER).read_text())
        except (OSError, ValueError):
            return None

    def commit(self, iteration: int, attempt: str) -> Path:
        """Give a complete, synced partial folder its name. From here on the checkpoint exists.

        Raises:
            OSError: if the folder could not be renamed; a checkpoint of that name stays what it was.
        """
        target = self.iteration(iteration)
        superseded = self.supersede([iteration])
        try:
            self.files.rename(self.partial(iteration, attempt), target)
        except OSError:
            for path in superseded:
                self.files.rename(path, target)
            raise
        self.files.sync_folder(self.root)
        try:
            self.track(iteration)
        except OSError as error:  # a hint only: the checkpoint is there all the same
            _log.error("%s still names an older iteration: %s", self.root / TRACKER, error)
        return target

    def track(self, iteration: int) -> None:
        """Replace Megatron's tracker."""
        replace_file(self.files, self.root / TRACKER, f"{iteration}\n".encode())

    def supersede(self, iterations: list[int]) -> list[Path]:
        """Rename committed folders that a new branch of the run overtakes, and return their new names."""
        renamed = []
        for iteration in iterations:
            source = self.iteration(iteration)
            if source.exists():
                renamed.append(self._free_name(f"{source.name}.superseded"))
                self.files.rename(source, renamed[-1])
        if renamed:
            self.files.sync_folder(self.root)
        return renamed

    def discard(self, iteration: int, attempt: str) -> Path:
        """Rename a committed folder away, durably: it no longer exists, and `remove_tree` may take its time."""
        target = self.root / f".{iteration_name(iteration)}.{attempt}.deleting"
        self.files.rename(self.iteration(iteration), target)
        self.files.sync_folder(self.root)
        return target

    def sweep(self) -> list[Path]:
        """Remove what dead attempts and interrupted deletions left, and return it. Only under the lock."""
        if not self.root.is_dir():
            return []
        leftovers = sorted(
            path
            for path in self.root.iterdir()
            if _LEFTOVER.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        )
        for path in leftovers:
            self.files.remove_tree(path)
        return leftovers

    def _free_name(self, stem: str) -> Path:
        number = 1
        while (self.root / f"{stem}-{number}").exists():
            number += 1
        return self.root / f"{stem}-{number}"
