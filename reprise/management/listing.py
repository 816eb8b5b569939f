"""Lists checkpoints: the newest from their JSON files, headers and first blocks, older ones at a glance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from reprise.errors import TrainerError
from reprise.format.host_file import HostFile
from reprise.format.names import ADAPTERS, HOST, MANIFEST
from reprise.loading.reader import Checkpoint, check_first_blocks, misleading_files, open_checkpoint, read_places
from reprise.management.glance import StateParser, glance, newest, trees_in
from reprise.management.host_share import missing_everywhere, share_of
from reprise.management.paths import checkpoint_folder, refuse_link
from reprise.management.summary import CheckpointStatus, CheckpointSummary
from reprise.paths import exists, is_file, is_symlink
from reprise.storage.files import Files
from reprise.storage.folder import iteration_of, shown_name
from reprise.storage.holds import is_held
from reprise.stores.location import files_of, location

CHECKED = 100  # newest checkpoints of a folder, by default


def list_checkpoints(*folders: str | Path, check: int | None = CHECKED) -> tuple[CheckpointSummary, ...]:
    """Return the checkpoints of runs in order, without reading their tensors beyond the first block of a file.

    Args:
        folders: of runs, of their checkpoints, or of hosts.
        check: how many of the newest checkpoints of each folder are checked, superseded ones last, and as many of its
            saves of the weights alone; None for all. An iteration checked in one of the folders is checked in all. The
            others are `unchecked`; one without a manifest, or whose state cannot be read, is checked.

    Raises:
        CheckpointError: if a folder is missing or holds no checkpoint. A damaged checkpoint is no error.
        OSError: if a folder cannot be listed.
    """
    roots = [checkpoint_folder(folder) for folder in map(location, folders)]
    listed = [(root, trees_in(root, files_of(root))) for root in roots]
    checked = {shown_name(path) for _, trees in listed for path in newest(trees, check)}
    summaries, parts = list[CheckpointSummary](), list[tuple[int, HostFile | None]]()
    for root, trees in listed:
        parser = StateParser()
        for path, tree in trees.items():
            files, checkpoint = files_of(path), None
            summary = None if shown_name(path) in checked else glance(root, path, tree, files, parser)
            if summary is None:
                summary, checkpoint = _summary(root, path, files)
            summaries.append(summary)
            parts += [] if checkpoint is None else [(checkpoint.iteration, checkpoint.host)]
    missing = missing_everywhere(folders, parts)
    return tuple(
        replace(summary, missing_everywhere=missing[summary.iteration]) if summary.iteration in missing else summary
        for summary in summaries
    )


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
        is_link=is_symlink(path),
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
    if exists(path / HOST):  # most of its files may be holes
        return files.allocated_bytes(path)
    paths = () if is_symlink(path) else path.rglob("*")
    return sum(file.lstat().st_size for file in paths if is_file(file))


def _written_at(path: Path) -> float:
    """Return the time a checkpoint was written, in Unix time. Not the folder's time: a `hold` file changes it."""
    manifest = path / MANIFEST
    return (manifest if exists(manifest) else path).lstat().st_mtime
