"""The folder of a run: one job writes to it at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.checkpoint.commit.channel import StoreChannel
from trainer.checkpoint.storage.lock import FolderLock
from trainer.errors import TrainerError


@contextmanager
def hold_run_folder(folder: Path, checkpoints: Path | None, channel: StoreChannel, nonce: str) -> Iterator[None]:
    """Hold the lock of a run's folder, which is made if needed. A call of all ranks; rank 0 has the lock.

    Args:
        folder: `run.dir`.
        checkpoints: `checkpoint.save`, which has a lock of its own; where it is the same folder, that lock does.

    Raises:
        LockError: on every rank, if another job writes to the folder.
        TrainerError: on every rank, if the folder cannot be written.
    """
    lock: FolderLock | None = None
    problem: TrainerError | None = None
    if channel.rank == 0 and (checkpoints is None or checkpoints.resolve() != folder.resolve()):
        try:
            lock = FolderLock(folder, nonce, kind="run folder", key="run.dir")
            lock.acquire()
        except TrainerError as error:
            problem = error
        except OSError as error:
            problem = cannot_write(folder, error)
    channel.agree("run folder", problem)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def cannot_write(folder: Path, error: OSError) -> TrainerError:
    """Return what to raise where a run's folder cannot be written."""
    return TrainerError(
        f"The run's folder cannot be written: {error.strerror} (errno {error.errno})",
        where=error.filename or folder,
        fix="Make room or mend the file system, or name another folder with run.dir.",
    )
