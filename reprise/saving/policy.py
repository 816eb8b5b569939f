"""Save settings (folder, retention, memory, timeouts) and save reports."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from reprise.errors import TrainerError
from reprise.format.layout import DEFAULT_FILE_BYTES
from reprise.format.mirror_record import MirrorRule
from reprise.storage.folder import FolderTerms

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints to keep.

    Kept are the newest `max_checkpoint_keep` (0 = all), every multiple of `save_retain_interval` (0 = none), the
    `keep_best` with the lowest validation loss, and the iterations `kept` in any case.

    The rules apply to scheduled checkpoints. An interim checkpoint, saved where a run was interrupted, stays until a
    later scheduled checkpoint is committed. So an interrupted run keeps the same checkpoints as an uninterrupted run.

    With a `mirror`, a checkpoint due in the store stays until the store has it.
    """

    max_checkpoint_keep: int = 0
    save_retain_interval: int = 0
    keep_best: int = 0
    kept: frozenset[int] = frozenset()
    mirror: MirrorRule | None = None

    def expired(
        self,
        committed: Collection[int],
        *,
        pinned: Collection[int] = (),
        losses: Mapping[int, float | None] | None = None,
        interim: Collection[int] = (),
    ) -> list[int]:
        """Return the iterations to delete, oldest first. The newest, `pinned` and `kept` ones are never deleted.

        The newest `max_checkpoint_keep` scheduled iterations stay, whatever other rules keep besides.

        Args:
            losses: Validation loss by iteration, None where unknown. Among equal losses the newest iteration is best.
            interim: The iterations with interim checkpoints. At most `max_checkpoint_keep` such checkpoints stay.
        """
        count = self.max_checkpoint_keep
        if count <= 0:
            return []
        scheduled = {*committed} - {*interim}
        due = sorted(scheduled)
        later = sorted(n for n in {*committed} - scheduled if n > max(due, default=-1))
        ranks = sorted((loss, -n) for n, loss in (losses or {}).items() if loss is not None and n in scheduled)
        best, interval = {-n for _, n in ranks[: self.keep_best]}, self.save_retain_interval
        retained = {n for n in due if n in best or (interval > 0 and n % interval == 0)}
        return sorted({*committed} - {*due[-count:], *later[-count:], *pinned, *self.kept} - retained)


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """Where and how to save, and which checkpoints to keep.

    Args:
        folder: The run's checkpoint folder. For local checkpoints each host has its own, at the same path.
        retention: Which checkpoints to keep.
        file_bytes: Size in bytes at which a safetensors file is full.
        commit_timeout_s: Seconds after which an uncommitted save is aborted.
        async_save: Write in the background while training continues.
        copies_at_call: Copy every tensor before a background save returns, instead of delaying the optimizer's next
            step. For programs changing tensors at any time.
        staging_bytes: Largest number of host memory bytes for copying chunks before the next optimizer step overwrites
            them. None allows all bytes the rank writes, plus its columns, which a host's ranks assemble in shared
            memory. With less memory, columns may be written row by row, and the step waits for the disk. Tensors that
            may change at any time (buffers, frozen parameters) are copied in addition.
        stall_timeout_s: Seconds this step waits for a stalled disk before the save is aborted.
        check_replicas: Compare replicas bit by bit at every n-th save. 0 never compares.
        terms: How messages name the folder.
        dtype: The saved tensors' dtype. None saves every tensor in its own dtype.
    """

    folder: Path
    retention: Retention = field(default_factory=Retention)
    file_bytes: int = DEFAULT_FILE_BYTES
    commit_timeout_s: float = 1800.0
    async_save: bool = False
    copies_at_call: bool = False
    staging_bytes: int | None = None
    stall_timeout_s: float = 5.0
    check_replicas: int = 1
    terms: FolderTerms = FolderTerms()  # noqa: RUF009 - frozen
    dtype: torch.dtype | None = None


@dataclass(slots=True)
class SaveReport:
    """The outcome of a save on this rank. `error` is set if the attempt did not become a checkpoint.

    Args:
        seconds: Seconds from the call, after it waited for the previous save, to the commit or the error.
        blocked_s: Seconds for which this save blocked training on this rank.
        waited_s: Seconds for which training waited for the previous save.
        copied_bytes: Bytes copied before training could continue.
    """

    iteration: int
    path: Path
    written_bytes: int
    seconds: float = 0.0
    blocked_s: float = 0.0
    waited_s: float = 0.0
    copied_bytes: int = 0
    error: TrainerError | None = None


@dataclass(slots=True)
class SaveResults:
    """A rank's save results.

    Args:
        reports: Reports on ended saves, until returned.
        blocked_s: Seconds for which saving blocked the main thread since the last `take_blocked_s`.
        last_error: Why the most recent save failed, or None if it became a checkpoint.
        failed_saves: How many saves in a row have failed.
    """

    reports: list[SaveReport] = field(default_factory=list)
    blocked_s: float = 0.0
    last_error: TrainerError | None = None
    failed_saves: int = 0

    def add(self, report: SaveReport) -> None:
        """Add an ended save's report."""
        if report.error is not None:
            report.error.__traceback__ = None  # its frames would keep the save alive as long as the error
        self.last_error = report.error
        self.failed_saves = 0 if report.error is None else self.failed_saves + 1
        self.reports.append(report)

    def take_blocked_s(self) -> float:
        """Return the seconds for which saving blocked the main thread since the last call."""
        blocked_s, self.blocked_s = self.blocked_s, 0.0
        return blocked_s
