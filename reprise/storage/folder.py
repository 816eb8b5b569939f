"""A run's checkpoint folder: names, listing, tracker, commit by rename, and sweep."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from reprise.errors import CheckpointError
from reprise.storage.atomic import temporary_of
from reprise.storage.files import Files, cannot_write
from reprise.storage.holds import is_held
from reprise.storage.paths import is_dir, is_file, is_symlink, matching, read_regular

_log = logging.getLogger(__name__)

WEIGHTS = "weights"  # the subfolder for saves of the weights alone
TRACKER = "latest_checkpointed_iteration.txt"
_MAX_TRACKER_BYTES = 64
Stamp = tuple[int, int]  # a folder's inode, and its modification time in ns
_ITERATION = re.compile(r"iter_(\d{7,})")
_ANY_ITERATION = re.compile(r"iter_(\d{7,})(\.superseded-\d+)?")
_SUPERSEDED = "iter_*.superseded-"
_LEFTOVER = re.compile(r"\.iter_\d{7,}\..*\.(partial|deleting)")
_DELETING = re.compile(r"\.(iter_\d{7,})\.(.*)\.deleting")
_MARK = re.compile(r"\.shared\..+\.mark")
_PARTIAL = re.compile(r"\.iter_(\d{7,})\.(.*)\.partial")
_REPLACED = re.compile(r"\.(iter_\d{7,})\..*\.replaced")
_OUTDATED = ".outdated.replaced"  # a checkpoint to delete once its replacement is durable


def iteration_name(iteration: int) -> str:
    """Return an iteration's folder name, the same as in Megatron-LM."""
    return f"iter_{iteration:07d}"


def iteration_of(path: Path) -> int | None:
    """Return the iteration in a checkpoint folder's name, or None for any other name."""
    return _iteration_in(path.name)


def _iteration_in(name: str) -> int | None:
    match = _ITERATION.fullmatch(name)
    iteration = int(match[1]) if match else None
    return iteration if iteration is not None and iteration_name(iteration) == name else None


def is_iteration_name(name: str) -> bool:
    """Return whether a name belongs to an iteration, committed or superseded."""
    return _ANY_ITERATION.fullmatch(name) is not None


def named_iteration(name: str) -> int | None:
    """Return the iteration in a committed or superseded folder's name, or None for any other name."""
    match = _ANY_ITERATION.fullmatch(name)
    return int(match[1]) if match else None


def shown_name(path: Path) -> str:
    """Return an iteration folder's name within its run."""
    return f"{WEIGHTS}/{path.name}" if path.parent.name == WEIGHTS else path.name


def kind_of(path: Path) -> str:
    """Describe a link or a file."""
    return f"a link to {os.readlink(path)}" if is_symlink(path) else "a file"


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

    def cannot_write(self, error: OSError, *, what: str = "The checkpoint folder") -> CheckpointError:
        """Return the error for this folder after a failed write."""
        return cannot_write(self.root, error, what=what, files=self.files, another=self.terms.another)

    def committed(self) -> list[int]:
        """Return the committed iterations in ascending order. Empty if the folder does not exist."""
        return self._iterations(are_folders=True)

    def _iterations(self, *, are_folders: bool) -> list[int]:
        paths = self.root.iterdir() if is_dir(self.root) else ()
        iterations = (iteration_of(path) for path in paths if (is_dir(path) and not is_symlink(path)) is are_folders)
        return sorted(iteration for iteration in iterations if iteration is not None)

    def stamps(self) -> dict[int, Stamp]:
        """Return each committed iteration folder's stamp, without opening the folder. Stamps are unique."""
        if not is_dir(self.root):
            return {}
        statuses = ((_iteration_in(name), status) for name, status in self.files.folders(self.root))
        # The inode alone is not unique: a freed inode is reused.
        return {i: (status.st_ino, status.st_mtime_ns) for i, status in statuses if i is not None}

    def non_folders(self) -> list[int]:
        """Return, in ascending order, the iterations whose name belongs to a link or a file, not a checkpoint.

        Another run may write to a link's target, and another host may not see it.
        """
        return self._iterations(are_folders=False)

    def held(self, iterations: Iterable[int]) -> list[int]:
        """Return the iterations protected by a hold."""
        return [iteration for iteration in iterations if is_held(self.iteration(iteration))]

    def iteration(self, iteration: int) -> Path:
        """Return the folder path for a committed iteration."""
        return self.root / iteration_name(iteration)

    def partial(self, iteration: int, attempt: str) -> Path:
        """Return the partial folder an attempt writes to."""
        return self.root / f".{iteration_name(iteration)}.{attempt}.partial"

    def mark(self, nonce: str) -> Path:
        """Return the marker file with which a launch's ranks check whether they share this folder."""
        return self.root / f".shared.{nonce}.mark"

    def tracker(self) -> int | None:
        """Return the iteration in Megatron's tracker file, which is only a hint. None if missing or unreadable."""
        return _read_tracker(self.root / TRACKER)

    def superseded(self) -> list[Path]:
        """Return the superseded folders, which another branch of the run has overtaken."""
        names = matching(self.root, f"{_SUPERSEDED}*")
        return [path for path in names if is_iteration_name(path.name) and iteration_of(path) is None]

    def partials(self) -> list[tuple[int, str]]:
        """Return each partial folder's iteration and attempt."""
        matches = (_PARTIAL.fullmatch(path.name) for path in sorted(self.root.iterdir()) if is_dir(path))
        return [(int(match[1]), match[2]) for match in matches if match]

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
            CheckpointError: A link or a file has the final name.
        """
        source, target = self.partial(iteration, attempt), self.iteration(iteration)
        aside: Path | None = None
        try:
            self.files.rename(source, target)
        except OSError as error:
            if error.errno == errno.ENOTDIR and self.files.exists(target):
                raise _name_is_taken(target) from error
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            aside = self.root / f".{target.name}.{attempt}{_OUTDATED if replaces else '.replaced'}"
            self._replace(source, target, aside)
        is_durable = True
        try:
            self.files.sync_together([partial(self.files.sync_folder, self.root), self._prepare_tracker])
        except OSError as error:
            if self._undo_commit(source, target, aside):
                raise
            _log.error("%s is there, but may not be durable: its folder cannot be synced: %s", target, error)
            is_durable = False
        if aside is not None and replaces and is_durable and not is_held(aside):
            leaving = self.leaving(iteration, attempt)
            with _errors_logged("the replaced %s could not be deleted", aside):  # the next start sweeps or completes it
                self.files.rename(aside, leaving)
                self.files.remove_tree(leaving)
        elif aside is not None:
            with _errors_logged("the replaced %s waits as %s for the next start", target, aside):
                self.files.rename(aside, self._free_name(target))
        self._update_tracker()
        return is_durable

    def supersede(self, iterations: list[int]) -> list[Path]:
        """Rename committed folders overtaken by a new branch of the run, and return their new paths.

        A link with such a name is itself renamed, not its target.
        """
        renamed = []
        if iterations and not set(self.committed()) - set(iterations):  # no checkpoint is left for the tracker to name
            self.files.remove_file(self.root / TRACKER)
        for iteration in iterations:
            source = self.iteration(iteration)
            if self.files.exists(source):
                renamed.append(self._free_name(source))
                self.files.rename(source, renamed[-1])
        if renamed:
            self.files.sync_folder(self.root)
            self._update_tracker()
        return renamed

    def discard(self, iteration: int, attempt: str) -> Path | None:
        """Durably rename a committed folder: the checkpoint no longer exists, and removing it may take long.

        Returns:
            The new path. None for a held folder, which keeps its name.
        """
        target = self.leaving(iteration, attempt)
        if not self.hide(self.iteration(iteration), target):
            return None
        self.files.sync_folder(self.root)
        return target

    def hide(self, source: Path, target: Path, *, held: Path | None = None) -> bool:
        """Rename a folder before its deletion, unless a hold protects it. Return whether it was renamed.

        A hold taken just before the rename is seen after it, and the folder gets its name back. Its reader misses the
        folder only for a moment.

        Args:
            held: The folder whose holds count, if not `source`.
        """
        if is_held(held or source):
            return False
        self.files.rename(source, target)
        if is_held(held or target):
            self.files.rename(target, source)
            return False
        return True

    def leaving(self, iteration: int, attempt: str) -> Path:
        """Return the path for a folder being deleted. `sweep` completes an interrupted deletion."""
        return self.root / f".{iteration_name(iteration)}.{attempt}.deleting"

    def sweep(self) -> list[Path]:
        """Remove leftovers from dead attempts and interrupted deletions, and return them. Only under the lock.

        A held leftover stays. If a removal fails, it is logged, and the leftover stays.
        """
        if not is_dir(self.root):
            return []
        paths = sorted(self.root.iterdir())
        folders = [path for path in paths if is_dir(path) and not is_symlink(path)]
        settled = [path for path in map(self._complete_commit, folders) if _LEFTOVER.fullmatch(path.name)]
        leftovers = [path for path in settled if not is_held(path)]
        leftovers += [path for path in paths if _MARK.fullmatch(path.name) and is_file(path)]
        removed = [path for path in leftovers if self._remove(path)]
        if committed := self.committed():  # otherwise only the tracker shows that there was a run
            self._report_lost(max(committed))
            self._update_tracker()
        return removed

    def _replace(self, partial: Path, target: Path, aside: Path) -> None:
        """Move an existing checkpoint aside and rename. `_complete_commit` completes an interrupted replacement."""
        self.files.rename(target, aside)
        try:
            self.files.rename(partial, target)
        except OSError:
            self.files.rename(aside, target)
            raise

    def _undo_commit(self, partial: Path, target: Path, aside: Path | None) -> bool:
        """Undo a commit. Return whether it is undone."""
        is_undone = False
        with _errors_logged("the commit of %s cannot be undone", target):
            self.files.rename(target, partial)
            is_undone = True
            with _errors_logged("%s waits as %s for the next start", target, aside):
                self.files.remove_file(temporary_of(self.root / TRACKER))
                if aside is not None:
                    self.files.rename(aside, target)
        return is_undone

    def _complete_commit(self, path: Path) -> Path:
        """Complete an interrupted commit that moved a checkpoint to `path`, if any. Return the path's new name.

        A held checkpoint renamed by `hide` gets its name back.
        """
        leaving = _DELETING.fullmatch(path.name)
        if leaving is not None and is_held(path):
            back = self.root / leaving[1]
            if not self.files.exists(back):
                self.files.rename(path, back)
                return back
        match = _REPLACED.fullmatch(path.name)
        if match is None:
            return path
        settled = self.root / match[1]
        if self.files.exists(settled) and path.name.endswith(_OUTDATED) and not is_held(path):
            self.files.sync_folder(self.root)  # make the replacement durable first
            settled = path.with_suffix(".deleting")
        elif self.files.exists(settled):
            settled = self._free_name(settled)
        self.files.rename(path, settled)
        return settled

    def _remove(self, path: Path) -> bool:
        try:
            (self.files.remove_tree if is_dir(path) else self.files.remove_file)(path)
        except OSError as error:
            _log.error("%s could not be swept: %s", path, error)
            return False
        return True

    def _report_lost(self, newest: int) -> None:
        """Warn if the tracker is ahead of the newest checkpoint, unless that iteration was superseded."""
        tracked = self.tracker()
        if tracked is None or tracked <= newest or matching(self.root, f"{iteration_name(tracked)}.superseded-*"):
            return
        _log.warning(
            "%s names iteration %d, but the newest checkpoint is %s: newer ones were removed, or are not visible here",
            self.root / TRACKER,
            tracked,
            iteration_name(newest),
        )

    def _prepare_tracker(self) -> None:
        """Durably write the next tracker beside the present tracker. Errors are left to `_update_tracker`."""
        with contextlib.suppress(OSError):
            self.files.write_whole(temporary_of(self.root / TRACKER), _tracker_line(max(self.committed())))

    def _update_tracker(self) -> None:
        """Update the tracker to the newest checkpoint. It is only a hint, so a failure is only logged.

        Its content is synced before the rename, its name is not. A power failure may leave the previous save's tracker,
        or none. The next start does not rely on it: it lists the folder and repairs the tracker.
        """
        tracker, prepared = self.root / TRACKER, temporary_of(self.root / TRACKER)
        with _errors_logged("%s could not be updated to the newest iteration", tracker):
            newest, tracked = max(self.committed(), default=None), self.tracker()
            if newest is None and tracked is not None:
                self.files.remove_file(tracker)
            if newest is not None and newest != tracked:
                if _read_tracker(prepared) != newest:
                    self.files.write_whole(prepared, _tracker_line(newest))
                self.files.rename(prepared, tracker)
            else:
                self.files.remove_file(prepared)

    def _free_name(self, iteration: Path) -> Path:
        number = 1
        while self.files.exists(path := iteration.with_name(f"{iteration.name}.superseded-{number}")):
            number += 1
        return path


@contextlib.contextmanager
def _errors_logged(what: str, *paths: Path | None) -> Iterator[None]:
    """Log a file system error in the block instead of raising it."""
    try:
        yield
    except OSError as error:
        _log.error(f"{what}: %s", *paths, error)


def _read_tracker(path: Path) -> int | None:
    try:
        return int(read_regular(path, limit_bytes=_MAX_TRACKER_BYTES))
    except (OSError, ValueError):
        return None


def _tracker_line(iteration: int) -> bytes:
    return f"{iteration}\n".encode()


def _name_is_taken(target: Path) -> CheckpointError:
    return CheckpointError(
        "A save cannot be renamed to its final name",
        where=target,
        expected="nothing, or a checkpoint",
        found=kind_of(target),
        fix="Remove it or move it away. Committed checkpoints are untouched.",
    )
