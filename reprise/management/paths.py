"""The checkpoints at a path: a single one, or a run's."""

from __future__ import annotations

from pathlib import Path

from reprise.errors import CheckpointError
from reprise.loading.choose import LoadSource, committed_in, no_folder
from reprise.loading.reader import Checkpoint, open_checkpoint
from reprise.storage.files import Files
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


def newest_checkpoint(path: Path, files: Files) -> Path:
    """Return `path` if it is a checkpoint, otherwise the newest checkpoint in the run there.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    if is_iteration_name(path.name):
        return path
    folder = CheckpointFolder(checkpoint_folder(path), files)
    committed = committed_in(folder)
    if not committed:
        raise _no_checkpoint(folder.root)
    return folder.iteration(committed[-1])


def open_newest(checkpoint: str | Path) -> Checkpoint:
    """Open a checkpoint, or a run's newest.

    Raises:
        CheckpointError: See `newest_checkpoint` and `open_checkpoint`.
    """
    path = location(checkpoint)
    files = files_of(path)
    return open_checkpoint(newest_checkpoint(path, files), files)


def refuse_link(path: Path) -> None:
    """Refuse a link in a run's folder. A link named by the caller is followed.

    Raises:
        CheckpointError: `path` is a link.
    """
    if is_symlink(path):
        raise CheckpointError("An iteration's path is not a checkpoint folder", where=path, found=kind_of(path))


def _iterations(folder: Path) -> list[Path]:
    iterations = (path for path in folder.iterdir() if is_iteration_name(path.name))
    weights = folder / WEIGHTS
    light_saves = _iterations(weights) if is_dir(weights) and not is_symlink(weights) else []
    return [*sorted(path for path in iterations if is_dir(path) or is_symlink(path)), *light_saves]


def _no_checkpoint(folder: Path) -> CheckpointError:
    return CheckpointError("A folder holds no checkpoint", where=folder, expected="an iter_ folder")
