"""Verifies every byte in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reprise.errors import TrainerError
from reprise.loading.blocks import verify_tensors
from reprise.loading.reader import Checkpoint, tensor_bytes
from reprise.management.host_share import HostShare, share_of
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
    """

    path: Path
    iteration: int | None
    status: CheckpointStatus
    problem: TrainerError | None
    checked_bytes: int | None = None
    share: HostShare | None = None


def verify(*checkpoints: str | Path, progress: ProgressCallback = ignore_progress) -> tuple[VerifiedCheckpoint, ...]:
    """Check checkpoints' every byte against their digests; in a host's folder, the pieces there.

    Args:
        checkpoints: Checkpoint folders, or run folders for all their checkpoints.
        progress: Called with a checkpoint name, the bytes read, and the total.

    Raises:
        CheckpointError: A folder is missing or holds no checkpoint. A damaged checkpoint does not raise.
        OSError: A folder cannot be listed.
    """
    return tuple(
        _verify(path, path == argument, progress)
        for argument in map(location, checkpoints)
        for path in all_checkpoints(argument)
    )


def _verify(path: Path, is_named: bool, progress: ProgressCallback) -> VerifiedCheckpoint:
    checked_bytes: int | None = None
    share: HostShare | None = None

    def check(checkpoint: Checkpoint) -> None:
        nonlocal checked_bytes, share
        share = share_of(checkpoint)
        total = tensor_bytes(checkpoint) if share is None else share.present_bytes
        progress(path.name, 0, total)
        checked_bytes = verify_tensors(checkpoint, progress=lambda n: progress(path.name, n, total))

    status, problem, checkpoint = examined(path, check, is_named=is_named)
    iteration = named_iteration(path.name) if checkpoint is None else checkpoint.iteration
    return VerifiedCheckpoint(path, iteration, status, problem, checked_bytes, share)
