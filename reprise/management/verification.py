"""Verifies every byte in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from reprise.errors import CheckpointError, TrainerError
from reprise.format.host_file import HostFile
from reprise.loading.reader import Checkpoint, open_checkpoint, read_places
from reprise.loading.verify import verify_share
from reprise.management.host_share import HostShare, missing_everywhere, share_of, stored_bytes, without_damage
from reprise.management.paths import all_checkpoints, refuse_link
from reprise.management.progress import ProgressCallback, ignore_progress
from reprise.management.summary import CheckpointStatus
from reprise.storage.files import Files
from reprise.storage.folder import named_iteration
from reprise.stores.locations import files_of, location


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """The result of reading a checkpoint's every byte.

    Args:
        path: The checkpoint folder.
        iteration: Its iteration.
        status: `part` if it is a host's folder with whole pieces.
        problem: The first damage, or the failed read.
        checked_bytes: Tensor bytes read. None if the checkpoint could not be read to its end.
        share: The pieces in its folder, if it is a host's folder.
        missing_everywhere: The pieces without an undamaged copy in any folder, in words. Empty if the folders are whole
            together, None for a single path or an iteration without parts.
    """

    path: Path
    iteration: int | None
    status: CheckpointStatus
    problem: TrainerError | None
    checked_bytes: int | None = None
    share: HostShare | None = None
    missing_everywhere: str | None = None


def verify(*checkpoints: str | Path, progress: ProgressCallback = ignore_progress) -> tuple[VerifiedCheckpoint, ...]:
    """Check checkpoints' every byte against their digests; in a host's folder, the pieces there.

    Args:
        checkpoints: Checkpoint folders, or run folders for all their checkpoints.
        progress: Called with a checkpoint name, the bytes read, and the total.

    Raises:
        CheckpointError: A folder is missing or holds no checkpoint. A damaged checkpoint does not raise.
        OSError: A folder cannot be listed.
    """
    results, parts = list[VerifiedCheckpoint](), list[tuple[int | None, HostFile | None]]()
    for argument in map(location, checkpoints):
        for path in all_checkpoints(argument):
            result, host = _verify(path, path == argument, len(checkpoints) > 1, progress, files_of(path))
            results.append(result)
            parts.append((result.iteration, host))
    missing = missing_everywhere(checkpoints, parts)
    return tuple(replace(result, missing_everywhere=missing.get(result.iteration)) for result in results)


def _verify(
    path: Path, is_named: bool, has_others: bool, progress: ProgressCallback, files: Files
) -> tuple[VerifiedCheckpoint, HostFile | None]:
    """Return a checkpoint's result and, for a local checkpoint, its undamaged pieces.

    Args:
        is_named: Whether the caller named the checkpoint itself.
        has_others: Whether other folders may have the damaged pieces.
    """
    result, host = VerifiedCheckpoint(path, named_iteration(path.name), CheckpointStatus.WHOLE, None), None
    try:
        if not is_named:
            refuse_link(path)
        checkpoint = open_checkpoint(path, files)
        result = replace(result, iteration=checkpoint.iteration, share=share_of(checkpoint))
        host = checkpoint.host
        try:
            result = replace(result, checked_bytes=_read(checkpoint, progress))
        except CheckpointError:
            host = without_damage(checkpoint) if has_others else None
            raise
    except TrainerError as error:
        return replace(result, status=CheckpointStatus.of(error), problem=error), host
    return replace(result, status=CheckpointStatus.WHOLE if checkpoint.is_whole else CheckpointStatus.PART), host


def _read(checkpoint: Checkpoint, progress: ProgressCallback) -> int:
    name, total = checkpoint.path.name, stored_bytes(checkpoint)
    progress(name, 0, total)
    places = read_places(checkpoint)
    return verify_share(checkpoint, places, rank=0, world_size=1, progress=lambda done: progress(name, done, total))
