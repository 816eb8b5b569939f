"""A listing's view of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from reprise.errors import TrainerError
from reprise.management.host_share import HostShare
from reprise.storage.json_file import Json


class CheckpointStatus(StrEnum):
    """Whether a checkpoint can be loaded.

    `part` is a single host's share. `unreadable` proves no damage. `unchecked` is a folder with a manifest whose
    content and size were not compared: the checkpoint may be whole, a part, or damaged.
    """

    WHOLE = "whole"
    PART = "part"
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"
    UNCHECKED = "unchecked"


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """A checkpoint in a listing.

    Args:
        folder: The run's checkpoint folder.
        path: The checkpoint's own folder.
        iteration: Its iteration. None for an unreadable superseded checkpoint.
        total_bytes: The size of its files in bytes; in a host's folder, their size on disk.
        written_at: When it was saved, in Unix time.
        status: Whether it is whole, judged by its JSON files, headers and each file's first block.
        problem: The damage, or the failed read.
        state: The parsed `trainer_state.json`. None if it is damaged or unreadable.
        share: The pieces in its folder, if it is a host's folder and checked.
        has_adapters: Whether it holds low-rank adapters.
        is_lightened: Whether its optimizer state was dropped.
        is_pinned: Whether a hold protects it from deletion.
        is_link: Whether its path is a symbolic link, which no run loads.
        is_superseded: Whether a later save replaced it.
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
    has_adapters: bool = False
    is_lightened: bool = False
    is_pinned: bool = False
    is_link: bool = False
    is_superseded: bool = False
