"""Opens rank 0's checkpoint on every other rank, and checks its identity."""

from __future__ import annotations

from pathlib import Path

from reprise.errors import CheckpointError, MismatchError, UnreadableError
from reprise.format.names import MANIFEST
from reprise.loading.reader import Checkpoint, open_checkpoint
from reprise.storage.files import Files
from reprise.storage.shared_folder import on_this_host, why_unseen


def open_same(path: Path, digest: str, files: Files, *, reader: int = 0) -> Checkpoint:
    """Open rank 0's checkpoint, with retries: a network file system may first show older or partial files.

    Rank 0 found the checkpoint complete, so a problem here is a difference in this host's files, not damage. Treating
    it as damage would make the run fall back to an older checkpoint.

    Args:
        digest: The digest of the manifest read by rank 0.
        reader: The rank with this digest, if not rank 0.

    Raises:
        MismatchError: After `SEEN_WITHIN_S`, this rank still reads another manifest, or finds a file missing or
            damaged. Names this host and the path.
        UnreadableError: See `open_checkpoint`.
    """
    checkpoints: list[Checkpoint] = []

    def look(path: Path) -> None:
        try:
            checkpoint = open_checkpoint(path, files, may_lack=True)
        except UnreadableError:
            raise
        except CheckpointError as error:
            raise OSError(str(error)) from error
        if checkpoint.digest != digest:
            raise OSError(f"digest {checkpoint.digest}")
        checkpoints.append(checkpoint)

    if difference := why_unseen(path, look):
        raise MismatchError(
            f"This host reads a different checkpoint from rank {reader} at the same path",
            where=on_this_host(path / MANIFEST),
            expected=f"digest {digest}",
            found=difference,
            fix="No training was done. Mount the same file system at this path on every host, or remove the copy that "
            "differs.",
        )
    return checkpoints[0]
