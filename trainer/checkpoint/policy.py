"""When and how a run is saved, and the report of a save. Values only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.checkpoint.format.layout import DEFAULT_FILE_BYTES
from trainer.errors import TrainerError


@dataclass(frozen=True, slots=True)
class Retention:
    """Keep the newest `max_checkpoint_keep` (0 = all), every multiple of `save_retain_interval` (0 = none), and the
    `keep_best` with the lowest validation loss."""

    max_checkpoint_keep: int = 0
    save_retain_interval: int = 0
    keep_best: int = 0

    def expired(
        self, committed: Sequence[int], *, pinned: Collection[int] = (), losses: Mapping[int, float] | None = None
    ) -> list[int]:
        """Return the iterations to delete, oldest first; never the newest, never a `pinned` one.

        Iterations that are kept for another reason do not use up the places of the newest ones.

        Args:
            losses: the validation loss of iterations that have one; of equal ones the newest counts as best.
        """
        if self.max_checkpoint_keep <= 0:
            return []
        newest = sorted(committed)[-self.max_checkpoint_keep :]
        known = {iteration: loss for iteration, loss in (losses or {}).items() if iteration in committed}
        best = sorted(known, key=lambda iteration: (known[iteration], -iteration))[: self.keep_best]
        kept = {*newest, *best, *pinned}
        return [
            iteration for iteration in sorted(committed) if iteration not in kept and not self._is_retained(iteration)
        ]

    def _is_retained(self, iteration: int) -> bool:
        return self.save_retain_interval > 0 and iteration % self.save_retain_interval == 0


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """When to save, where, and which checkpoints stay.

    Args:
        folder: the run's checkpoint folder; None means that saving is off.
        save_interval: save at every multiple of it; 0 means only when `save` is called.
        file_bytes: size in bytes at which a safetensors file is full.
        commit_timeout_s: how long a save may take before it is aborted.
        async_save: write while training goes on.
        staging_bytes: host memory for copies of what an optimizer step would change before it is written; None is what
            the rank writes, and once more what it has of columns: they come together with those of the host's other
            ranks, unless that exceeds it. With less, that step waits for the disk. What may change at any time
            (buffers, frozen parameters) is copied besides.
        stall_timeout_s: how long that step waits for a disk that writes nothing before the save is aborted.
        check_replicas: compare the bits of ranks that hold the same tensor at every so many saves; 0 never.
    """

    folder: Path | None
    save_interval: int = 0
    retention: Retention = field(default_factory=Retention)
    file_bytes: int = DEFAULT_FILE_BYTES
    commit_timeout_s: float = 1800.0
    async_save: bool = False
    staging_bytes: int | None = None
    stall_timeout_s: float = 5.0
    check_replicas: int = 1


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The report of one save on this rank; `error` is set if the attempt did not become a checkpoint.

    Args:
        seconds: from the call until the checkpoint was committed, or the error.
        blocked_s: how long training stood still for it on this rank.
        waited_s: how long training stood still before it, until the save that was under way had ended.
        copied_bytes: how many bytes were copied so that training could go on.
    """

    iteration: int
    path: Path
    written_bytes: int
    seconds: float
    blocked_s: float = 0.0
    waited_s: float = 0.0
    copied_bytes: int = 0
    error: TrainerError | None = None
