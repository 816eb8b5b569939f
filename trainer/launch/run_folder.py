"""The lock on a run's folder: only one job at a time writes to it."""

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
    """Hold the lock on a run's folder, creating the folder if needed. Collective. Rank 0 holds the lock.

    Args:
        folder: The run's folder, `run.dir`.
        checkpoints: The checkpoint folder, `checkpoint.save`, which has its own lock. If it is the same folder, no
            second lock is taken.

    Raises:
        LockError: Another job writes to the folder. Every rank raises.
        TrainerError: The folder cannot be written. Every rank raises.
    """
    lock = FolderLock(folder, nonce, another=RUN.another)
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
    """Return the error for an unwritable run folder."""
    return cannot_write(folder, error, what="The run's folder", another=RUN.another)
