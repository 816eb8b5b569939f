"""Chooses the checkpoint to load: an iteration folder, or a run's newest valid checkpoint. Rank 0 only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from reprise.errors import CheckpointError, LaunchError, MismatchError, TrainerError, UnreadableError
from reprise.format.host_file import PieceNumbers
from reprise.format.lineage import Lineage, saved_lineage
from reprise.format.names import MANIFEST
from reprise.loading.blocks import check_first_blocks
from reprise.loading.newest import advice_on_other_program
from reprise.loading.reader import Checkpoint, open_checkpoint, open_same
from reprise.storage.files import Files
from reprise.storage.folder import CheckpointFolder, is_iteration_name, iteration_of, kind_of
from reprise.storage.paths import exists, is_dir
from reprise.storage.patience import look

_log = logging.getLogger(__name__)


class LocalFolders(Protocol):
    """The local checkpoints on a run's hosts. Implemented by `local.host_folders.HostFolders`."""

    folder: CheckpointFolder  # this host's

    def paths(self, iteration: int | None = None) -> list[Path]:
        """Return the checkpoints whole on the hosts together, newest first, or only a given one. Rank 0 only."""

    def describe_missing(self) -> str:
        """Describe what the newest checkpoint lacks. Empty if there is no checkpoint. Rank 0 only."""

    def complete(
        self, path: Path, check: Callable[[Checkpoint], None], pieces_of: Callable[[Checkpoint], PieceNumbers]
    ) -> tuple[str, str]:
        """Fetch to every host its ranks' pieces. Return the digest, and in words where they came from. Collective."""

    def heal(self, path: Path) -> bool:
        """Discard damaged pieces on every host. Return whether there were any. Collective."""


@dataclass(frozen=True, slots=True)
class LoadTerms:
    """The caller's setting names, used in advice. The defaults suit a caller passing the path as an argument.

    Args:
        path: The setting for the folder.
        iteration: The setting for the iteration in it.
        fresh: How to start without a checkpoint. Empty if impossible.
    """

    path: str = "the path"
    iteration: str = "the iteration"
    fresh: str = ""

    def advice(self, fix: str) -> str:
        """Return a sentence advising `fix`, or starting without a checkpoint."""
        return f"{fix}, or {self.fresh}." if self.fresh else f"{fix}."


@dataclass(frozen=True, slots=True)
class LoadSource:
    """The folder to load from: a run's checkpoint folder, optionally with an `iteration`, or an iteration folder.

    Args:
        lineage: The resuming run's lineage. Checkpoints outside its branches are not candidates. None accepts all.
        local: The hosts' local checkpoints, which are further candidates. None without local checkpoints.
    """

    path: Path
    iteration: int | None = None
    terms: LoadTerms = LoadTerms()
    lineage: Lineage | None = None
    local: LocalFolders | None = None

    @staticmethod
    def named(path: Path, *, terms: LoadTerms = LoadTerms()) -> LoadSource:
        """Return the source for a user's path: a run's own folder, its checkpoint folder or an iteration."""
        inner = path / "checkpoints"
        return LoadSource(inner if is_dir(inner) else path, terms=terms)


def no_folder(path: Path, *, kind: str = "folder", fix: str | None = None) -> CheckpointError:
    """Return the error for a missing path, or a path to a file."""
    if exists(path):
        return CheckpointError("The path is a file, not a folder", where=path, fix=fix)
    return CheckpointError(f"The {kind} does not exist", where=path, fix=fix)


def committed_in(folder: CheckpointFolder) -> list[int]:
    """Return a run's committed iterations in ascending order. Log links among them.

    Raises:
        CheckpointError: The newest name is a link or a file: falling back to an older checkpoint would lose it.
        OSError: The folder cannot be listed.
    """
    committed = folder.committed()
    for iteration in sorted({*folder.taken()} - {*committed}, reverse=True):
        path = folder.iteration(iteration)
        if iteration > max(committed, default=-1):
            raise CheckpointError(
                "The newest iteration of a run is not a folder",
                where=path,
                expected="a folder",
                found=kind_of(path),
                fix="Replace the link with its target, remove it, or load the target.",
            )
        _log.warning("ignoring %s: it is %s, not a checkpoint of this run", path, kind_of(path))
    return committed


def _require_admitted(checkpoint: Checkpoint, lineage: Lineage) -> None:
    """Refuse a checkpoint outside a run's branches.

    Raises:
        MismatchError: It belongs to another run.
        CheckpointError: It belongs to a branch abandoned by the run.
    """
    saved = saved_lineage(checkpoint.state, where=checkpoint.path)
    if lineage.admits(saved, checkpoint.iteration):
        return
    fix = (
        "To start a new run from it, use a new folder. To continue this run from it, move run.json out of the run's "
        "folder."
    )
    if saved.run == lineage.run:
        what = "The checkpoint belongs to an abandoned branch of this run"
        raise CheckpointError(what, where=checkpoint.path, fix=fix)
    raise MismatchError(
        "A checkpoint belongs to another run",
        where=checkpoint.path,
        expected=f"run {lineage.run}",
        found=f"run {saved.run}" if saved.run else "a checkpoint without a run id",
        fix=fix,
    )


class Chooser:
    """Offers a source's candidates, newest first, each checked as far as possible without reading its tensors.

    Args:
        check: Raises MismatchError for another run's valid checkpoint, before any tensor file is opened. By default,
            every checkpoint will do.

    Attributes:
        checkpoint: The checkpoint picked last. None if it is a local one.
    """

    def __init__(self, source: LoadSource, files: Files, check: Callable[[Checkpoint], None] = lambda _: None) -> None:
        self._source, self._files, self._check = source, files, check
        self._candidates: list[Path] | None = None
        self._is_exact = False
        self._skipped: list[str] = []  # each skipped checkpoint's name and problem
        self.checkpoint: Checkpoint | None = None

    def pick(self, damage: TrainerError | None = None) -> Path:
        """Return the newest candidate left: a valid one, opened, or a local one, which the hosts must complete first.

        Args:
            damage: Why the candidate picked last is skipped.

        Raises:
            MismatchError: The candidate belongs to another run.
            UnreadableError: The candidate or the folder cannot be read now. An older checkpoint does not replace it.
            CheckpointError: No valid candidate is left. Lists the skipped checkpoints with the reasons.
        """
        while True:
            if damage is not None:
                self.skip(damage)
            if self._candidates is None:
                self._candidates = look(self._find, where=self._source.path)
            if not self._candidates:
                raise CheckpointError(
                    "No valid checkpoint is left",
                    where=self._source.path,
                    found="; ".join(self._skipped) or "none",
                    fix=self._source.terms.advice("Make one of them valid"),
                )
            path, self.checkpoint = self._candidates[0], None
            if self._is_local(path):
                return path
            try:
                self.checkpoint = checkpoint = open_checkpoint(path, self._files, may_lack=True)
                if self._source.lineage is not None:
                    _require_admitted(checkpoint, self._source.lineage)
                self._check(checkpoint)
                check_first_blocks(checkpoint)
            except TrainerError as error:
                damage = error
                continue
            for problem in checkpoint.lacking.values():
                _log.warning("%s The file holds no run state, so the checkpoint is loaded without it.", problem)
            return path

    def open(self) -> Checkpoint:
        """Return the candidate that `pick` returns, where the source has no local ones."""
        self.pick()
        assert self.checkpoint is not None
        return self.checkpoint

    def open_picked(self, path: Path, digest: str, *, by_rank: int) -> Checkpoint:
        """Return the candidate that a rank has picked, open on this rank.

        Args:
            path: Its path on this host.
            digest: The digest of its manifest.

        Raises:
            TrainerError: See `open_same`, or `open_checkpoint` for a local candidate.
        """
        if self._is_local(path):  # found to be the same on every host: a problem now is damage
            return open_checkpoint(path, self._files, may_lack=True)
        return self.checkpoint or open_same(path, digest, self._files, reader=by_rank)

    def skip(self, error: TrainerError) -> None:
        """Remove the newest candidate left because of `error`, and log it.

        Raises:
            TrainerError: `error` itself, if it is a mismatch, proves nothing about the checkpoint, or no candidate is
                left for an iteration requested by the user.
        """
        is_last = self._is_exact and len(self._candidates or ()) < 2
        if is_last or isinstance(error, (LaunchError, MismatchError, UnreadableError)):
            raise error
        if self._candidates:
            skipped = self._candidates.pop(0).name
            _log.error("%s is skipped: %s", skipped, str(error).removesuffix(error.fix or "").rstrip())
            self._skipped.append(f"{skipped}: {str(error).rstrip('.')}")

    def _is_local(self, path: Path) -> bool:
        local = self._source.local
        return local is not None and path.parent == local.folder.root

    def _find(self) -> list[Path]:
        host_folders = self._source.local
        if host_folders is None:
            return self._find_shared()
        folder, iteration = CheckpointFolder(self._source.path, self._files), self._source.iteration
        local = host_folders.paths(iteration)
        has_shared = folder.root != host_folders.folder.root
        names = folder.taken() if has_shared else []
        shared = self._find_shared() if names and (iteration is None or iteration in names or not local) else []
        if not local and not shared:
            raise CheckpointError(
                "No local checkpoint is complete, and no shared folder has a checkpoint",
                where=self._source.path,
                found=host_folders.describe_missing() or "no local checkpoint",
                fix=self._source.terms.advice("Bring back the hosts with the missing pieces"),
            )
        # If an iteration is in both, the local checkpoint stays first.
        return sorted([*local, *shared], key=lambda path: iteration_of(path) or 0, reverse=True)

    def _find_shared(self) -> list[Path]:
        path, iteration, terms = self._source.path, self._source.iteration, self._source.terms
        if not is_dir(path):
            raise no_folder(path, kind="checkpoint folder", fix=f"Correct {terms.path}.")
        if exists(path / MANIFEST) or is_iteration_name(path.name):
            if iteration is not None:
                raise CheckpointError(
                    "An iteration was requested from a folder that is itself one iteration",
                    where=path,
                    found=f"iteration {iteration}",
                    fix=f"Omit {terms.iteration}, or set {terms.path} to the run's checkpoint folder.",
                )
            self._is_exact = True
            return [path]
        folder = CheckpointFolder(path, self._files)
        if iteration is not None:
            committed = folder.committed()
            if iteration not in committed:
                raise CheckpointError(
                    "An iteration was never saved",
                    where=folder.iteration(iteration),
                    expected="one of " + (", ".join(map(str, committed)) or "none"),
                    fix=f"Correct {terms.iteration}.",
                )
            self._is_exact = True
            return [folder.iteration(iteration)]
        committed = committed_in(folder)
        if not committed:
            raise CheckpointError(
                "A folder holds no checkpoint",
                where=path,
                expected="an iter_ folder",
                fix=f"{advice_on_other_program(path) or f'Correct {terms.path}'}.",
            )
        return [folder.iteration(number) for number in reversed(committed)]
