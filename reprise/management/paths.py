"""The checkpoints at a path: a single one, or a run's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from reprise.errors import CheckpointError, TrainerError, UnreadableError
from reprise.loading.choose import LoadSource, committed_in, no_folder
from reprise.loading.reader import Checkpoint, open_checkpoint
from reprise.management.summary import CheckpointStatus
from reprise.storage.folder import WEIGHTS, CheckpointFolder, is_iteration_name, kind_of
from reprise.storage.paths import is_dir, is_symlink
from reprise.stores.locations import files_of, location


def checkpoint_folder(path: Path) -> Path:
    """Return a run's checkpoint folder: `path` itself, or `checkpoints` in it.

    Raises:
        CheckpointError: There is no such folder.
    """
    if not is_dir(path):
        raise no_folder(path)
    return LoadSource.named(path).path


def all_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoint at `path`, or a run's checkpoints in order, weights-only saves last.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    return [path] if is_iteration_name(path.name) else checkpoints_in(checkpoint_folder(path))


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a run's checkpoint folder in order, weights-only saves last.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    checkpoints = _iterations(folder)
    if not checkpoints:
        raise _no_checkpoint(folder)
    return checkpoints


def open_newest(checkpoint: str | Path) -> Checkpoint:
    """Open a checkpoint, or a run's newest.

    Raises:
        CheckpointError: There is no checkpoint, or see `open_checkpoint`.
    """
    path = location(checkpoint)
    files = files_of(path)
    if not is_iteration_name(path.name):
        folder = CheckpointFolder(checkpoint_folder(path), files)
        if not (committed := committed_in(folder)):
            raise _no_checkpoint(folder.root)
        path = folder.iteration(committed[-1])
    return open_checkpoint(path, files)


Examined = tuple[CheckpointStatus, TrainerError | None, Checkpoint | None]


def examined(path: Path, check: Callable[[Checkpoint], object], *, is_named: bool = False) -> Examined:
    """Open a checkpoint and check it. Return its status, its damage or failed read, and the checkpoint if it opens.

    Args:
        is_named: Whether the caller named the checkpoint itself, so that a link is followed.
    """
    checkpoint: Checkpoint | None = None
    try:
        if is_symlink(path) and not is_named:
            raise CheckpointError("An iteration's path is not a checkpoint folder", where=path, found=kind_of(path))
        checkpoint = open_checkpoint(path, files_of(path))
        check(checkpoint)
    except TrainerError as error:
        is_damage = not isinstance(error, UnreadableError)
        return CheckpointStatus.DAMAGED if is_damage else CheckpointStatus.UNREADABLE, error, checkpoint
    return CheckpointStatus.WHOLE if checkpoint.is_whole else CheckpointStatus.PART, None, checkpoint


def _iterations(folder: Path) -> list[Path]:
    iterations = (path for path in folder.iterdir() if is_iteration_name(path.name))
    weights = folder / WEIGHTS
    light_saves = _iterations(weights) if is_dir(weights) and not is_symlink(weights) else []
    return [*sorted(path for path in iterations if is_dir(path) or is_symlink(path)), *light_saves]


def _no_checkpoint(folder: Path) -> CheckpointError:
    return CheckpointError("A folder holds no checkpoint", where=folder, expected="an iter_ folder")
