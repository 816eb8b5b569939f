"""What a listing says of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from reprise.errors import TrainerError, UnreadableError
from reprise.management.host_share import HostShare
from reprise.storage.json_file import Json


class CheckpointStatus(StrEnum):
    """Whether a checkpoint can be loaded.

    `part` is the share of one host, and `unreadable` proves no damage. `unchecked` says that there is a folder with a
    manifest, whose content and size were not compared with anything: the checkpoint may be whole, a part, or damaged.
    """

    WHOLE = "whole"
    PART = "part"
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"
    UNCHECKED = "unchecked"

    @staticmethod
    def of(error: TrainerError) -> CheckpointStatus:
        """Return the status of a checkpoint with an error."""
        return CheckpointStatus.UNREADABLE if isinstance(error, UnreadableError) else CheckpointStatus.DAMAGED


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """A checkpoint of a folder.

    Args:
        folder: the checkpoint folder of the run.
        path: the folder of the checkpoint.
        iteration: its iteration; None for an unreadable superseded checkpoint.
        total_bytes: the size of its files, in bytes; in the folder of a host, their size on the disk.
        written_at: the time at which it was saved, in Unix time.
        status: whether it is whole, as far as its JSON files, headers and the first block of each file show.
        problem: the damage, or the failed read.
        state: its `trainer_state.json`; None if it is damaged or cannot be read, or unchecked in a store.
        share: the pieces in its folder, if it is the folder of one host, and checked.
        missing_everywhere: the pieces missing in all listed folders, in words; empty if the folders are whole together,
            None where a single folder is listed, or no checked part of the iteration.
        foreign_files: files read by transformers in place of the checkpoint's own; none of an unchecked one are known.
        has_adapters: whether it holds low-rank adapters.
        is_lightened: whether the optimizer's state was dropped.
        is_pinned: whether a hold protects it from deletion.
        is_link: whether its path is a symbolic link, which no run loads.
        is_superseded: whether a later save of the iteration replaced it.
    """

    folder: Path
    path: Path
    iteration: int | None
    total_bytes: int
    written_at: float
    status: CheckpointStatus
    problem: TrainerError | None
    state: Json | None = None
    share: HostShare | None = None
    missing_everywhere: str | None = None
    foreign_files: tuple[str, ...] = ()
    has_adapters: bool = False
    is_lightened: bool = False
    is_pinned: bool = False
    is_link: bool = False
    is_superseded: bool = False
