"""The folder of a run's checkpoints: its iterations and their names, its lock, the names of a checkpoint's files."""

from reprise.format.names import ACCESSORIES, ADAPTERS, FORMAT, HOST, INDEX, INTERIM, MANIFEST, STATE
from reprise.storage.folder import (
    HOLD,
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
    "STATE",
    "TRACKER",
    "WEIGHTS",
    "CheckpointFolder",
    "FolderLock",
    "FolderTerms",
    "is_iteration_name",
    "iteration_name",
    "iteration_of",
    "kind_of",
    "named_iteration",
    "shown_name",
]
