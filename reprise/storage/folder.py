"""A run's checkpoint folder: names, listing, tracker, commit by rename, and sweep."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR

from reprise.errors import CheckpointError
from reprise.storage.atomic import temporary_of
from reprise.storage.files import Files, cannot_write
from reprise.storage.holds import is_held
from reprise.storage.paths import is_dir, is_symlink, lexists, matching, read_regular

_log = logging.getLogger(__name__)

WEIGHTS = "weights"  # the subfolder for saves of the weights alone
TRACKER = "latest_checkpointed_iteration.txt"
_NAME = re.compile(r"iter_(\d{7,})(\.superseded-\d+)?")
_TEMPORARY = re.compile(rf"\.({_NAME.pattern})\.(.*)\.(partial|deleting|replaced)")
_OUTDATED = ".outdated"  # ends the attempt in the name of a replaced folder to be deleted


def iteration_name(iteration: int) -> str:
    """Return an iteration's folder name, the same as in Megatron-LM."""
    return f"iter_{iteration:07d}"


def iteration_of(path: Path) -> int | None:
    """Return the iteration in a checkpoint folder's name, or None for any other name."""
    iteration = named_iteration(path.name)
    return iteration if iteration is not None and iteration_name(iteration) == path.name else None


def is_iteration_name(name: str) -> bool:
    """Return whether a name belongs to an iteration, committed or superseded."""
    return named_iteration(name) is not None


def named_iteration(name: str) -> int | None:
    """Return the iteration in a committed or superseded folder's name, or None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def shown_name(path: Path) -> str:
    """Return an iteration folder's name within its run."""
    return f"{WEIGHTS}/{path.name}" if path.parent.name == WEIGHTS else path.name


def kind_of(path: Path) -> str:
    """Describe a link or a file."""
    return f"a link to {os.readlink(path)}" if is_symlink(path) else "a file"


def require_vacant(path: Path, fix: str = "Move it away, or name another folder.") -> None:
    """Refuse the path of an iteration that is there, whatever it is.

    Raises:
        CheckpointError: Names it.
    """
    if lexists(path):
        raise CheckpointError("The iteration already exists", where=path, fix=fix)


@dataclass(frozen=True, slots=True)
class FolderTerms:
    """How advice in messages names the caller's settings. The defaults suit callers passing a folder argument.

    Args:
        another: What the user should name to write elsewhere.
        keep: The setting for how many checkpoints to keep.
        unshared: Advice for hosts without a common folder, as a sentence. Empty for none.
    """

    another: str = "another folder"
    keep: str = "max_checkpoint_keep"
    unshared: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A folder for a run's saves. Only its leader changes names in it, and only under the lock.

    `root` is made absolute, so changing the working directory later has no effect.
    """

    root: Path
    files: Files
    terms: FolderTerms = FolderTerms()

    def __post_init__(self) -> None:
        """Make the root absolute."""
        object.__setattr__(self, "root", self.root.absolute())

    @contextlib.contextmanager
    def writing(
        self, what: str = "The checkpoint folder", path: Path | None = None, room: int | None = None
    ) -> Iterator[None]:
        """Turn a file system error in the block into the error for `what`, which cannot be written.

        Args:
            path: What is being written, if the error does not name it. By default the folder.
            room: How many bytes are being written, for the message.
        """
        try:
            yield
        except OSError as error:
            raise cannot_write(
                path or self.root, error, what=what, files=self.files, another=self.terms.another, room=room
            ) from error

    def committed(self) -> list[int]:
        """Return the committed iterations in ascending order. Empty if the folder does not exist."""
        return [iteration for iteration, status in self.taken().items() if S_ISDIR(status.st_mode)]

    def taken(self) -> dict[int, os.stat_result]:
        """Return the status of each iteration's name, in ascending order: a checkpoint, or a link or a file.

        Another run may write to a link's target, and another host may not see it.
        """
        statuses = dict[int, os.stat_result]()
        for path in matching(self.root, "iter_*"):
            if (iteration := iteration_of(path)) is not None:
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    statuses[iteration] = path.lstat()
        return dict(sorted(statuses.items()))

    def held(self, iterations: Iterable[int]) -> list[int]:
        """Return the iterations protected by a hold."""
        return [iteration for iteration in iterations if is_held(self.iteration(iteration))]

    def iteration(self, iteration: int) -> Path:
        """Return the folder path for a committed iteration."""
        return self.root / iteration_name(iteration)

    def partial(self, iteration: int, attempt: str) -> Path:
        """Return the partial folder an attempt writes to."""
        return self.root / f".{iteration_name(iteration)}.{attempt}.partial"

    def tracker(self) -> int | None:
        """Return the iteration in Megatron's tracker file, which is only a hint. None if missing or unreadable."""
        try:
            return int(read_regular(self.root / TRACKER))
        except (OSError, ValueError):
            return None

    def superseded(self) -> list[Path]:
        """Return the superseded folders, which another branch of the run has overtaken."""
        return [path for path in matching(self.root, "iter_*.superseded-*") if is_iteration_name(path.name)]

    def partials(self) -> list[tuple[int, str]]:
        """Return each partial folder's iteration and attempt."""
        return [(int(match[2]), match[4]) for _, match in self._temporaries() if match[5] == "partial"]

    def _temporaries(self) -> list[tuple[Path, re.Match[str]]]:
        """Return the folders that saves and deletions have renamed, or are about to, with their names' parts."""
        paths = [path for path in matching(self.root, ".iter_*") if is_dir(path) and not is_symlink(path)]
        return [(path, match) for path in paths if (match := _TEMPORARY.fullmatch(path.name))]

    def commit(self, iteration: int, attempt: str, *, replaces: bool = False) -> bool:
        """Rename a complete, synced partial folder to its final name. From here on the checkpoint exists.

        Invariant: a process whose partial folder was swept by its successor changes nothing here.

        Args:
            replaces: Whether to delete an existing checkpoint with the final name instead of keeping it as superseded.
                A held checkpoint is always kept.

        Returns:
            Whether the name is durable. False if the rename could be neither synced nor undone: the checkpoint exists,
                but a power failure may remove it.

        Raises:
            OSError: The rename failed, or was undone because it could not be made durable. An existing checkpoint with
                the final name is unchanged.
        """
        source, target = self.partial(iteration, attempt), self.iteration(iteration)
        aside = self.root / f".{target.name}.{attempt}{_OUTDATED if replaces else ''}.replaced"
        is_durable, is_aside = True, lexists(source) and lexists(target)
        if is_aside:
            self.files.rename(target, aside)
        try:
            self.files.rename(source, target)
            try:
                self.files.sync_folder(self.root)
            except OSError as error:
                try:
                    self.files.rename(target, source)
                except OSError as failure:
                    is_durable = False
                    _log.error(
                        "%s is there, but may not be durable: %s. It cannot be undone: %s", target, error, failure
                    )
                else:
                    raise
        finally:
            if is_aside:
                self._settle(aside)
        self._update_tracker()
        return is_durable

    def supersede(self, iterations: list[int]) -> list[Path]:
        """Rename committed folders overtaken by a new branch of the run, and return their new paths.

        A link with such a name is itself renamed, not its target.
        """
        if not iterations:
            return []
        renamed = []
        self.files.remove(self.root / TRACKER)  # a kill may leave no checkpoint for it to name
        for iteration in iterations:
            source = self.iteration(iteration)
            renamed.append(self._free_name(source))
            self.files.rename(source, renamed[-1])
        self.files.sync_folder(self.root)
        self._update_tracker()
        return renamed

    def delete(self, path: Path, attempt: str, *, inside: Path | None = None) -> bool:
        """Durably rename a folder, which is no longer a checkpoint then, and delete it. Return whether it is deleted.

        A folder with a hold stays. A hold taken just before the rename is seen after it, and the folder gets its name
        back. Its reader misses the folder only for a moment. `sweep` completes an interrupted deletion.

        Args:
            attempt: A name never used before for a deletion here.
            inside: The checkpoint around the folder, whose holds count. By default the folder itself is a checkpoint.
        """
        leaving = self.root / f".{(inside or path).name}.{attempt}.deleting"
        if is_held(inside or path):
            return False
        self.files.rename(path, leaving)
        if is_held(inside or leaving):
            self.files.rename(leaving, path)
            return False
        for folder in {path.parent, self.root}:
            self.files.sync_folder(folder)
        self.files.remove(leaving)
        return True

    def sweep(self) -> list[Path]:
        """Remove leftovers from dead attempts and interrupted deletions, and return them. Only under the lock.

        A checkpoint moved aside by an interrupted commit, or held while being deleted, gets its name back, or a
        superseded one, unless the commit was to delete it and only its end is missing. If that fails, it is logged, and
        the leftover stays.
        """
        removed = [path for path, _ in self._temporaries() if self._settle(path)]
        if committed := self.committed():  # otherwise only the tracker shows that there was a run
            if (tracked := self.tracker() or 0) > committed[-1]:
                _log.warning(
                    "%s names iteration %d, but the newest checkpoint is %s: newer ones were removed or are hidden",
                    self.root / TRACKER,
                    tracked,
                    iteration_name(committed[-1]),
                )
            self._update_tracker()
        return removed

    def _settle(self, path: Path) -> bool:
        """Remove a temporary folder, or give a checkpoint its name back, or a superseded one. Log a failure.

        Returns:
            Whether it is removed.
        """
        match = _TEMPORARY.fullmatch(path.name)
        assert match is not None
        target, is_replaced = self.root / match[1], match[5] == "replaced"
        try:
            is_free = not lexists(target)
            is_checkpoint = is_replaced and (is_free or not match[4].endswith(_OUTDATED))
            if is_checkpoint or (match[5] != "partial" and is_held(path)):
                self.files.rename(path, target if is_free else self._free_name(self.iteration(int(match[2]))))
                return False
            if is_replaced:  # first its successor's name is durable
                self.files.sync_folder(self.root)
            self.files.remove(path)
        except OSError as error:
            _log.error("%s waits for the next start: %s", path, error)
            return False
        return True

    def _update_tracker(self) -> None:
        """Update the tracker to the newest checkpoint. It is only a hint, so it is not synced, and a failure is logged.

        After a power failure it may be old, empty or missing. The next start repairs it.
        """
        tracker = self.root / TRACKER
        try:
            newest = max(self.committed(), default=None)
            if newest is None:
                self.files.remove(tracker)
            elif newest != self.tracker():
                self.files.close(self.files.write_new(temporary_of(tracker), f"{newest}\n".encode()))
                self.files.rename(temporary_of(tracker), tracker)
        except OSError as error:
            _log.error("%s could not be updated to the newest iteration: %s", tracker, error)

    def _free_name(self, iteration: Path) -> Path:
        number = 1
        while lexists(path := iteration.with_name(f"{iteration.name}.superseded-{number}")):
            number += 1
        return path
