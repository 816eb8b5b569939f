"""The folder of a run's checkpoints: names, listing, tracker, commit by rename, and sweep."""

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

WEIGHTS = "weights"  # the folder below a run's checkpoints in which saves of the weights alone lie
TRACKER = "latest_checkpointed_iteration.txt"
_MOST_TRACKER_BYTES = 64
Stamp = tuple[int, int]  # of a folder: the inode, and the time of its last new name in ns
_ITERATION = re.compile(r"iter_(\d{7,})")
_ANY_ITERATION = re.compile(r"iter_(\d{7,})(\.superseded-\d+)?")
_SUPERSEDED = "iter_*.superseded-"
_LEFTOVER = re.compile(r"\.iter_\d{7,}\..*\.(partial|deleting)")
_DELETING = re.compile(r"\.(iter_\d{7,})\.(.*)\.deleting")
_MARK = re.compile(r"\.shared\..+\.mark")
_PARTIAL = re.compile(r"\.iter_(\d{7,})\.(.*)\.partial")
_REPLACED = re.compile(r"\.(iter_\d{7,})\..*\.replaced")
_OUTDATED = ".outdated.replaced"  # what an attempt deletes once it has replaced it


def iteration_name(iteration: int) -> str:
    """Return the folder name of an iteration, as Megatron-LM names it."""
    return f"iter_{iteration:07d}"


def iteration_of(path: Path) -> int | None:
    """Return the iteration in a checkpoint folder's name, or None if it is not a checkpoint's name."""
    return _iteration_in(path.name)


def _iteration_in(name: str) -> int | None:
    match = _ITERATION.fullmatch(name)
    iteration = int(match[1]) if match else None
    return iteration if iteration is not None and iteration_name(iteration) == name else None


def is_iteration_name(name: str) -> bool:
    """Return whether a folder has the name of an iteration, superseded ones included."""
    return _ANY_ITERATION.fullmatch(name) is not None


def named_iteration(name: str) -> int | None:
    """Return the iteration in a folder name, superseded ones included, or None."""
    match = _ANY_ITERATION.fullmatch(name)
    return int(match[1]) if match else None


def shown_name(path: Path) -> str:
    """Return the name of an iteration's folder within its run."""
    return f"{WEIGHTS}/{path.name}" if path.parent.name == WEIGHTS else path.name


def kind_of(path: Path) -> str:
    """Return in words the kind of a path other than a folder."""
    return f"a link to {os.readlink(path)}" if is_symlink(path) else "a file"


@dataclass(frozen=True, slots=True)
class FolderTerms:
    """How advice names what the caller has set; by default for a caller with the folder as an argument.

    Args:
        another: what to give in order to write elsewhere.
        keep: the number of checkpoints to keep.
        unshared: a sentence for hosts without a common folder; empty if there is no advice.
    """

    another: str = "another folder"
    keep: str = "max_checkpoint_keep"
    unshared: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The folder of a run's saves. Only rank 0 changes names in it, and only under the lock.

    `root` becomes absolute: a later change of the working folder changes nothing.
    """

    root: Path
    files: Files
    terms: FolderTerms = FolderTerms()

    def __post_init__(self) -> None:
        """Make the root absolute."""
        object.__setattr__(self, "root", self.root.absolute())

    def cannot_write(self, error: OSError, *, what: str = "The checkpoint folder") -> CheckpointError:
        """Return the error of this folder if it cannot be written."""
        return cannot_write(self.root, error, what=what, files=self.files, another=self.terms.another)

    def committed(self) -> list[int]:
        """Return the committed iterations in ascending order; an empty list if the folder does not exist."""
        return self._iterations(are_folders=True)

    def _iterations(self, *, are_folders: bool) -> list[int]:
        paths = self.root.iterdir() if is_dir(self.root) else ()
        iterations = (iteration_of(path) for path in paths if (is_dir(path) and not is_symlink(path)) is are_folders)
        return sorted(iteration for iteration in iterations if iteration is not None)

    def stamps(self) -> dict[int, Stamp]:
        """Return the stamp of the folder of each committed iteration, from the root alone; equal for no two folders."""
        if not is_dir(self.root):
            return {}
        statuses = ((_iteration_in(name), status) for name, status in self.files.folders(self.root))
        # A freed inode is used again.
        return {i: (status.st_ino, status.st_mtime_ns) for i, status in statuses if i is not None}

    def non_folders(self) -> list[int]:
        """Return, in ascending order, the iterations whose name belongs to a link or a file, not a checkpoint.

        The target of a link may be written by another run, and may be invisible on another host.
        """
        return self._iterations(are_folders=False)

    def held(self, iterations: Iterable[int]) -> list[int]:
        """Return the iterations protected by a hold."""
        return [iteration for iteration in iterations if is_held(self.iteration(iteration))]

    def iteration(self, iteration: int) -> Path:
        """Return the folder of a committed iteration."""
        return self.root / iteration_name(iteration)

    def partial(self, iteration: int, attempt: str) -> Path:
        """Return the folder in which an attempt writes."""
        return self.root / f".{iteration_name(iteration)}.{attempt}.partial"

    def mark(self, nonce: str) -> Path:
        """Return the marker file by which the ranks of a launch check for one common folder."""
        return self.root / f".shared.{nonce}.mark"

    def tracker(self) -> int | None:
        """Return the iteration in Megatron's tracker file, only a hint; None if it is missing or unreadable."""
        return _tracked(self.root / TRACKER)

    def superseded(self) -> list[Path]:
        """Return the folders of iterations overtaken by another branch of the run."""
        names = matching(self.root, f"{_SUPERSEDED}*")
        return [path for path in names if is_iteration_name(path.name) and iteration_of(path) is None]

    def partials(self) -> list[tuple[int, str]]:
        """Return the iteration and the attempt of each partial folder."""
        matches = (_PARTIAL.fullmatch(path.name) for path in sorted(self.root.iterdir()) if is_dir(path))
        return [(int(match[1]), match[2]) for match in matches if match]

    def commit(self, iteration: int, attempt: str, *, replaces: bool = False) -> bool:
        """Rename a complete, synced partial folder to its final name. From here on the checkpoint exists.

        Invariant: a process whose partial folder was swept by its successor changes nothing here.

        Args:
            replaces: whether a checkpoint of the final name is deleted, in place of being kept as superseded; a held
                checkpoint is kept.

        Returns:
            Whether the name is durable. If it is not, and the rename could not be undone either, the checkpoint exists,
                but a power failure may undo it.

        Raises:
            OSError: if the rename failed, or was undone because it could not be made durable; a checkpoint of the final
                name is unchanged.
            CheckpointError: if a link or a file has the final name.
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
            if self._take_back(source, target, aside):
                raise
            _log.error("%s is there, but may not be durable: its folder cannot be synced: %s", target, error)
            is_durable = False
        if aside is not None and replaces and is_durable and not is_held(aside):
            leaving = self.leaving(iteration, attempt)
            with _logged("the replaced %s could not be deleted", aside):  # the next start sweeps or settles it
                self.files.rename(aside, leaving)
                self.files.remove_tree(leaving)
        elif aside is not None:
            with _logged("the replaced %s waits as %s for the next start", target, aside):
                self.files.rename(aside, self._free_name(target))
        self._mend_tracker()
        return is_durable

    def supersede(self, iterations: list[int]) -> list[Path]:
        """Rename committed folders overtaken by a new branch of the run, and return their new names.

        A link of such a name is renamed itself, not its target.
        """
        renamed = []
        if iterations and not set(self.committed()) - set(iterations):  # nothing is left that the tracker could name
            self.files.remove_file(self.root / TRACKER)
        for iteration in iterations:
            source = self.iteration(iteration)
            if self.files.exists(source):
                renamed.append(self._free_name(source))
                self.files.rename(source, renamed[-1])
        if renamed:
            self.files.sync_folder(self.root)
            self._mend_tracker()
        return renamed

    def discard(self, iteration: int, attempt: str) -> Path | None:
        """Rename a committed folder away, durably: it no longer exists, and `remove_tree` may take its time.

        Returns:
            Its new path; None for a held folder, which keeps its name.
        """
        target = self.leaving(iteration, attempt)
        if not self.hide(self.iteration(iteration), target):
            return None
        self.files.sync_folder(self.root)
        return target

    def hide(self, source: Path, target: Path, *, held: Path | None = None) -> bool:
        """Rename a folder before its deletion, unless a hold protects it; return whether the folder was renamed.

        Args:
            held: the folder in which a hold counts, if it is another than `source`.

        A hold taken before the rename is seen after it at the latest, and the folder gets its name back. Its
        reader misses the folder only for a moment.
        """
        if is_held(held or source):
            return False
        self.files.rename(source, target)
        if is_held(held or target):
            self.files.rename(target, source)
            return False
        return True

    def leaving(self, iteration: int, attempt: str) -> Path:
        """Return the name of a folder that is deleted; `sweep` deletes the rest of it."""
        return self.root / f".{iteration_name(iteration)}.{attempt}.deleting"

    def sweep(self) -> list[Path]:
        """Remove the leftovers of dead attempts and interrupted deletions, and return them. Only under the lock.

        A held leftover stays. So does a leftover whose removal fails, which is logged.
        """
        if not is_dir(self.root):
            return []
        paths = sorted(self.root.iterdir())
        folders = [path for path in paths if is_dir(path) and not is_symlink(path)]
        settled = [path for path in map(self._settle, folders) if _LEFTOVER.fullmatch(path.name)]
        leftovers = [path for path in settled if not is_held(path)]
        leftovers += [path for path in paths if _MARK.fullmatch(path.name) and is_file(path)]
        removed = [path for path in leftovers if self._remove(path)]
        if committed := self.committed():  # else it is all that tells of a run whose checkpoints are gone
            self._report_lost(max(committed))
            self._mend_tracker()
        return removed

    def _replace(self, partial: Path, target: Path, aside: Path) -> None:
        """Rename over an existing checkpoint, which is moved aside first; `_settle` completes an interrupted rename."""
        self.files.rename(target, aside)
        try:
            self.files.rename(partial, target)
        except OSError:
            self.files.rename(aside, target)
            raise

    def _take_back(self, partial: Path, target: Path, aside: Path | None) -> bool:
        """Undo a commit; return whether it is undone."""
        is_undone = False
        with _logged("%s cannot be taken back", target):
            self.files.rename(target, partial)
            is_undone = True
            with _logged("%s waits as %s for the next start", target, aside):
                self.files.remove_file(temporary_of(self.root / TRACKER))
                if aside is not None:
                    self.files.rename(aside, target)
        return is_undone

    def _settle(self, path: Path) -> Path:
        """Complete the commit whose replaced checkpoint lies at `path`, if any; return its name afterwards.

        A held checkpoint that `hide` has renamed gets its name back.
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
            self.files.sync_folder(self.root)  # what has replaced it is durable before it goes
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
        """Log a tracker ahead of the newest checkpoint; a superseded checkpoint was renamed on purpose."""
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
        """Write the next tracker beside the present tracker, durably; `_mend_tracker` reports what goes wrong."""
        with contextlib.suppress(OSError):
            self.files.write_whole(temporary_of(self.root / TRACKER), _tracker_line(max(self.committed())))

    def _mend_tracker(self) -> None:
        """Make the tracker name the newest checkpoint. It is only a hint, so a failure is logged.

        Its name is not synced. A power failure may leave the tracker of the save before, or none; the next start lists
        the folder, reads no tracker for it, and mends this tracker. Its content is durable before it has the name.
        """
        tracker, prepared = self.root / TRACKER, temporary_of(self.root / TRACKER)
        with _logged("%s names another iteration than the newest", tracker):
            newest, tracked = max(self.committed(), default=None), self.tracker()
            if newest is None and tracked is not None:
                self.files.remove_file(tracker)
            if newest is not None and newest != tracked:
                if _tracked(prepared) != newest:
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
def _logged(what: str, *paths: Path | None) -> Iterator[None]:
    """Log a failure of the file system, which ends the block and nothing else."""
    try:
        yield
    except OSError as error:
        _log.error(f"{what}: %s", *paths, error)


def _tracked(path: Path) -> int | None:
    try:
        return int(read_regular(path, limit_bytes=_MOST_TRACKER_BYTES))
    except (OSError, ValueError):
        return None


def _tracker_line(iteration: int) -> bytes:
    return f"{iteration}\n".encode()


def _name_is_taken(target: Path) -> CheckpointError:
    return CheckpointError(
        "A save cannot have the name of its iteration",
        where=target,
        expected="nothing, or a checkpoint",
        found=kind_of(target),
        fix="Remove it, or move it away: a link is no checkpoint of the run. Committed checkpoints are untouched.",
    )
