"""The lock of a run's folder: a single job writes to it at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reprise.errors import TrainerError
from reprise.ranks import StoreChannel
from reprise.storage import FolderLock, cannot_write
from trainer.config.terms import RUN


@contextmanager
def hold_run_folder(folder: Path, checkpoints: Path | None, channel: StoreChannel, nonce: str) -> Iterator[None]:
    """Hold the lock of a run's folder, which is created if needed. Collective; rank 0 holds the lock.

    Args:
        folder: `run.dir`.
        checkpoints: `checkpoint.save`, which has its own lock; no second lock is taken where it is the same folder.

    Raises:
        LockError: on every rank, if another job writes to the folder.
        TrainerError: on every rank, if the folder cannot be written.
    """
    lock = FolderLock(folder, nonce, kind="run folder", another=RUN.another)
    has_lock = channel.rank == 0 and (checkpoints is None or checkpoints.resolve() != folder.resolve())
    try:
        with channel.agreed("run folder"):
            try:
                if has_lock:
                    lock.acquire()
            except OSError as error:
                raise run_folder_failed(folder, error) from error
        yield
    finally:
        lock.release()


def run_folder_failed(folder: Path, error: OSError) -> TrainerError:
    """Return the error of a run's unwritable folder."""
    return cannot_write(folder, error, what="The run's folder", another=RUN.another)
