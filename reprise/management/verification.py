"""Verifies every byte in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from reprise.errors import TrainerError
from reprise.format.host_file import HostFile
from reprise.loading.reader import Checkpoint, read_places
from reprise.loading.verify import verify_share
from reprise.management.host_share import HostShare, missing_everywhere, share_of, stored_bytes, without_damage
from reprise.management.paths import all_checkpoints, examined
from reprise.management.progress import ProgressCallback, ignore_progress
from reprise.management.summary import CheckpointStatus
from reprise.storage.folder import named_iteration
from reprise.stores.locations import location


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
    results, hosts = list[VerifiedCheckpoint](), list[HostFile | None]()
    for argument in map(location, checkpoints):
        for path in all_checkpoints(argument):
            result, checkpoint = _verify(path, path == argument, progress)
            results.append(result)
            is_whole = checkpoint is None or result.problem is None or len(checkpoints) < 2
            hosts.append(None if checkpoint is None else checkpoint.host if is_whole else without_damage(checkpoint))
    missing = missing_everywhere(checkpoints, zip((result.iteration for result in results), hosts, strict=True))
    return tuple(replace(result, missing_everywhere=missing.get(result.iteration)) for result in results)


def _verify(path: Path, is_named: bool, progress: ProgressCallback) -> tuple[VerifiedCheckpoint, Checkpoint | None]:
    name, result = path.name, VerifiedCheckpoint(path, named_iteration(path.name), CheckpointStatus.WHOLE, None)

    def check(checkpoint: Checkpoint) -> None:
        nonlocal result
        result = replace(result, iteration=checkpoint.iteration, share=share_of(checkpoint))
        places, total = read_places(checkpoint), stored_bytes(checkpoint)
        progress(name, 0, total)
        count = verify_share(checkpoint, places, rank=0, world_size=1, progress=lambda n: progress(name, n, total))
        result = replace(result, checked_bytes=count)

    status, problem, checkpoint = examined(path, check, is_named=is_named)
    return replace(result, status=status, problem=problem), checkpoint
