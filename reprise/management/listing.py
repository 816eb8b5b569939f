"""Lists checkpoints from their JSON files, headers and first blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from reprise.errors import TrainerError, UnreadableError
from reprise.format.host_file import HostFile
from reprise.format.names import ADAPTERS, HOST, MANIFEST
from reprise.json_file import Json
from reprise.loading.reader import Checkpoint, check_first_blocks, misleading_files, open_checkpoint, read_places
from reprise.management.host_share import HostShare, missing_everywhere, share_of
from reprise.management.paths import checkpoint_folder, checkpoints_in, refuse_link
from reprise.storage.files import Files
from reprise.storage.folder import iteration_of
from reprise.storage.holds import is_held
from reprise.stores.location import files_of, location


class CheckpointStatus(StrEnum):
    """Whether a checkpoint can be loaded: `part` is the share of one host, `unreadable` proves no damage."""

    WHOLE = "whole"
    PART = "part"
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"

    @staticmethod
    def of(error: TrainerError) -> CheckpointStatus:
        """Return the status of a checkpoint with an error."""
        return CheckpointStatus.UNREADABLE if isinstance(error, UnreadableError) else CheckpointStatus.DAMAGED


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """A checkpoint of a folder.

    Args:
        folder: the checkpoint folder of the run.
        path: the folder of the checkpoint.
        iteration: its iteration; None for an unreadable superseded checkpoint.
        total_bytes: the size of its files, in bytes; in the folder of a host, their size on the disk.
        written_at: the time at which it was saved, in Unix time.
        status: whether it is whole, as far as its JSON files, headers and the first block of each file show.
        problem: the damage, or the failed read.
        state: its `trainer_state.json`; None if it is damaged or cannot be read.
        share: the pieces in its folder, if it is the folder of one host.
        missing_everywhere: the pieces missing in all listed folders, in words; empty if the folders are whole together,
            None where a single folder is listed, or no part of the iteration.
        foreign_files: files read by transformers in place of the checkpoint's own.
        has_adapters: whether it holds low-rank adapters.
        is_pinned: whether a hold protects it from deletion.
        is_link: whether its path is a symbolic link, which no run loads.
        is_superseded: whether a later save of the iteration replaced it.
    """

    folder: Path
    path: Path
    iteration: int | None
    total_bytes: int
    written_at: float
    status: CheckpointStatus
    problem: TrainerError | None
    state: Json | None = None
    share: HostShare | None = None
    missing_everywhere: str | None = None
    foreign_files: tuple[str, ...] = ()
    has_adapters: bool = False
    is_pinned: bool = False
    is_link: bool = False
    is_superseded: bool = False


def list_checkpoints(*folders: str | Path) -> tuple[CheckpointSummary, ...]:
    """Return the checkpoints of runs in order, without reading their tensors.

    Args:
        folders: of runs, of their checkpoints, or of hosts.

    Raises:
        CheckpointError: if a folder is missing or holds no checkpoint. A damaged checkpoint is no error.
        OSError: if a folder cannot be listed.
    """
    summaries, parts = list[CheckpointSummary](), list[tuple[int, HostFile | None]]()
    for argument in map(location, folders):
        folder = checkpoint_folder(argument)
        for path in checkpoints_in(folder):
            summary, checkpoint = _summary(folder, path, files_of(path))
            summaries.append(summary)
            parts += [] if checkpoint is None else [(checkpoint.iteration, checkpoint.host)]
    missing = missing_everywhere(folders, parts)
    return tuple(replace(summary, missing_everywhere=missing.get(summary.iteration)) for summary in summaries)


def is_whole(path: Path, files: Files) -> bool:
    """Return whether a checkpoint is whole, as far as its JSON files, headers and first blocks show."""
    return _summary(path.parent, path, files)[0].status is CheckpointStatus.WHOLE


def _summary(folder: Path, path: Path, files: Files) -> tuple[CheckpointSummary, Checkpoint | None]:
    """Return the summary of a checkpoint, and the checkpoint unless it cannot be opened."""
    summary = CheckpointSummary(
        folder,
        path,
        iteration_of(path),
        size_of(path, files),
        _written_at(path),
        CheckpointStatus.WHOLE,
        None,
        is_pinned=is_held(path),
        is_link=path.is_symlink(),
        is_superseded=iteration_of(path) is None,
    )
    checkpoint: Checkpoint | None = None
    try:
        refuse_link(path)
        checkpoint = open_checkpoint(path, files)
        summary = replace(summary, iteration=checkpoint.iteration, has_adapters=ADAPTERS in checkpoint.manifest.files)
        check_first_blocks(checkpoint, read_places(checkpoint))
        summary = replace(summary, state=checkpoint.state)
        summary = replace(summary, foreign_files=tuple(misleading_files(checkpoint)))
        status = CheckpointStatus.WHOLE if checkpoint.is_whole else CheckpointStatus.PART
        return replace(summary, status=status, share=share_of(checkpoint)), checkpoint
    except TrainerError as error:
        return replace(summary, status=CheckpointStatus.of(error), problem=error), checkpoint


def size_of(path: Path, files: Files) -> int:
    """Return the size of a checkpoint's files in bytes; in the folder of a host, their size on the disk."""
    if (path / HOST).exists():  # most of its files may be holes
        return files.allocated_bytes(path)
    paths = () if path.is_symlink() else path.rglob("*")
    return sum(file.lstat().st_size for file in paths if file.is_file())


def _written_at(path: Path) -> float:
    """Return the time a checkpoint was written, in Unix time. Not the folder's time: a `hold` file changes it."""
    manifest = path / MANIFEST
    return (manifest if manifest.exists() else path).lstat().st_mtime
