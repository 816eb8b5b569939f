"""The settings of saving (interval, retention, memory, timeouts) and the report of a save."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from reprise.errors import TrainerError
from reprise.format.layout import DEFAULT_FILE_BYTES
from reprise.format.mirror_record import MirrorRule
from reprise.storage.folder import FolderTerms


@dataclass(frozen=True, slots=True)
class Retention:
    """Keep the newest `max_checkpoint_keep` (0 = all), every multiple of `save_retain_interval` (0 = none), the
    `keep_best` with the lowest validation loss, the iterations in `always`, and those `named` by the command.

    The rules apply to checkpoints of the schedule. An interim checkpoint, made where a run was interrupted, stays until
    a later checkpoint of the schedule is committed. So an interrupted run keeps the checkpoints of the unbroken run.

    With a `mirror`, a checkpoint that the store must have stays until the store has it.
    """

    max_checkpoint_keep: int = 0
    save_retain_interval: int = 0
    keep_best: int = 0
    always: frozenset[int] = frozenset()
    named: frozenset[int] = frozenset()
    mirror: MirrorRule | None = None

    def expired(
        self,
        committed: Collection[int],
        *,
        pinned: Collection[int] = (),
        losses: Mapping[int, float] | None = None,
        interim: Collection[int] = (),
    ) -> list[int]:
        """Return the iterations to delete, oldest first. Never among them are the newest, the `pinned` and the `named`.

        Iterations kept by another rule do not count toward `max_checkpoint_keep`.

        Args:
            losses: validation loss by iteration, where known; among equal losses the newest iteration is best.
            interim: the iterations whose checkpoints are interim; at most `max_checkpoint_keep` of them stay.
        """
        count = self.max_checkpoint_keep
        if count <= 0:
            return []
        due = sorted(iteration for iteration in committed if iteration not in interim)
        later = sorted(
            iteration for iteration in committed if iteration in interim and iteration > max(due, default=-1)
        )
        scheduled = {*due}
        losses_of_due = {iteration: loss for iteration, loss in (losses or {}).items() if iteration in scheduled}
        best = sorted(losses_of_due, key=lambda iteration: (losses_of_due[iteration], -iteration))[: self.keep_best]
        retained = [iteration for iteration in due if self._is_retained(iteration)]
        return sorted(set(committed) - {*due[-count:], *later[-count:], *best, *retained, *pinned, *self.named})

    def _is_retained(self, iteration: int) -> bool:
        is_multiple = self.save_retain_interval > 0 and iteration % self.save_retain_interval == 0
        return is_multiple or iteration in self.always


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """Where to and how to save, and which checkpoints to keep.

    Args:
        folder: the run's checkpoint folder; that of each host's own, at the same path on all, for local checkpoints.
        file_bytes: size in bytes at which a safetensors file is full.
        commit_timeout_s: seconds after which an uncommitted save is aborted.
        async_save: write in the background while training continues.
        copies_at_call: copy every tensor before a background save returns, in place of holding back the optimizer's
            step: for programs with changes of tensors at any time.
        staging_bytes: upper bound in bytes on host memory for copies of chunks before the next optimizer step
            overwrites them. None allows the bytes written by the rank plus the bytes of its columns, which the ranks of
            a host assemble in shared memory if they fit. With less memory, the step waits for the disk. Tensors
            changeable at any time (buffers, frozen parameters) are copied in addition.
        stall_timeout_s: seconds this step waits for a stalled disk before the save is aborted.
        check_replicas: compare the bits of replicas at every n-th save; 0 never compares.
        terms: how messages name the folder.
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


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The outcome of a save on this rank; `error` is set if the attempt did not become a checkpoint.

    Args:
        seconds: time from the call to the commit or the error.
        blocked_s: time for which this save blocked training on this rank, in seconds.
        waited_s: time for which training waited for the end of the previous save, in seconds.
        copied_bytes: bytes copied for training to continue.
    """

    iteration: int
    path: Path
    written_bytes: int
    seconds: float
    blocked_s: float = 0.0
    waited_s: float = 0.0
    copied_bytes: int = 0
    error: TrainerError | None = None


@dataclass(slots=True)
class SaveResults:
    """The results of the saves of one rank.

    Args:
        reports: of background saves ended and not returned yet.
        blocked_s: for how long saving kept the main thread since `take_blocked_s`.
        last_error: why the last save to end became no checkpoint, or None if it did.
        failed_saves: how many saves in a row have failed.
    """

    reports: list[SaveReport] = field(default_factory=list)
    blocked_s: float = 0.0
    last_error: TrainerError | None = None
    failed_saves: int = 0

    def add(self, report: SaveReport) -> None:
        """Add the report of an ended save."""
        if report.error is not None:
            report.error.__traceback__ = None  # its frames hold the save, and the error is kept
        self.last_error = report.error
        self.failed_saves = 0 if report.error is None else self.failed_saves + 1
        self.reports.append(report)

    def take_blocked_s(self) -> float:
        """Return for how long saving kept the main thread since the last call."""
        blocked_s, self.blocked_s = self.blocked_s, 0.0
        return blocked_s
