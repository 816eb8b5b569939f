"""The folder of a run's checkpoints: its iterations and their names, its lock, holds, the names of their files."""

from reprise.format.names import (
    ACCESSORIES,
    ADAPTERS,
    FORMAT,
    HOST,
    INDEX,
    INTERIM,
    MANIFEST,
    OPTIMIZER_DROPPED,
    STATE,
    STILL_MIRRORED,
)
from reprise.storage.folder import (
    TRACKER,
    WEIGHTS,
    CheckpointFolder,
    FolderTerms,
    is_iteration_name,
    iteration_name,
    iteration_of,
    named_iteration,
    shown_name,
)
from reprise.storage.holds import HOLD, Hold
from reprise.storage.lock import FolderLock, is_locked
from reprise.stores.holds import ManifestVersion, StoredHold, manifest_version, take_hold
