"""Saving: plan, snapshot, write, commit."""

from typing import TYPE_CHECKING

from reprise.lazy import importer

if TYPE_CHECKING:
    from reprise.saving.checkpointer import Checkpointer as Checkpointer
    from reprise.saving.column_sharing import SharedMemory as SharedMemory
    from reprise.saving.one_process import write_checkpoint as write_checkpoint
    from reprise.saving.plan import Holding as Holding
    from reprise.saving.plan import pieces_of as pieces_of
    from reprise.saving.policy import Retention as Retention
    from reprise.saving.policy import SavePolicy as SavePolicy
    from reprise.saving.policy import SaveReport as SaveReport
    from reprise.saving.policy import SaveResults as SaveResults

_NAMES = {
    "saving.checkpointer": "Checkpointer",
    "saving.column_sharing": "SharedMemory",
    "saving.one_process": "write_checkpoint",
    "saving.plan": "Holding pieces_of",
    "saving.policy": "Retention SavePolicy SaveReport SaveResults",
}

if not TYPE_CHECKING:
    __getattr__ = importer(__name__, _NAMES)
