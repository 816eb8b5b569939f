"""The folder of a run's checkpoints: its iterations and their names, its lock, holds, the names of their files."""

from reprise.format.names import ACCESSORIES, ADAPTERS, FORMAT, HOST, INDEX, INTERIM, MANIFEST, OPTIMIZER_DROPPED, STATE
from reprise.storage.folder import (
    TRACKER,
    WEIGHTS,
    CheckpointFolder,
    FolderTerms,
    is_iteration_name,
    iteration_name,
    iteration_of,
    kind_of,
    named_iteration,
    shown_name,
)
from reprise.storage.holds import HOLD, Hold
from reprise.storage.lock import FolderLock

__all__ = [
    "ACCESSORIES",
    "ADAPTERS",
    "FORMAT",
    "HOLD",
    "HOST",
    "INDEX",
    "INTERIM",
    "MANIFEST",
    "OPTIMIZER_DROPPED",
    "STATE",
    "TRACKER",
    "WEIGHTS",
    "CheckpointFolder",
    "FolderLock",
    "FolderTerms",
    "Hold",
    "is_iteration_name",
    "iteration_name",
    "iteration_of",
    "kind_of",
    "named_iteration",
    "shown_name",
]
