"""A checkpoint library: whole logical tensors, written in place by all ranks, committed by a single rename.

    from reprise import save, load                          a model and its optimizer
    from reprise import save_state_dict, load_state_dict    a nested state dict, on any process group
    from reprise import AsyncSaver                          both in the background
    from reprise import latest                              the newest checkpoint's path

    import reprise                                          manage saved checkpoints:
    reprise.list, reprise.show                              list a folder's checkpoints; describe a checkpoint
    reprise.verify, reprise.diff                            check every byte; compare two, tensor by tensor
    reprise.prune, reprise.drop_optimizer                   delete old checkpoints, or their optimizer state
    reprise.gather                                          join hosts' folders
    reprise.copy                                            copy to, from or between object stores

The library is independent of the trainer around it and works with any torch model and optimizer.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from reprise.errors import (
    CheckpointError,
    ConfigError,
    LockError,
    MismatchError,
    PartialLoadError,
    ReplicaError,
    TrainerError,
    UnreadableError,
)
from reprise.lazy import importer

if TYPE_CHECKING:
    from reprise.api import load, load_state_dict, save, save_state_dict
    from reprise.async_saver import AsyncSaver
    from reprise.loading.newest import latest
    from reprise.management.comparison import CheckpointDifference, FieldDifference, TensorDifference, diff
    from reprise.management.contents import CheckpointContents, FileSummary, TensorSummary, show
    from reprise.management.copying import CopiedCheckpoint, copy
    from reprise.management.gathering import GatherReport, GatherSource, gather
    from reprise.management.host_share import HostShare
    from reprise.management.listing import list_checkpoints
    from reprise.management.progress import ProgressCallback
    from reprise.management.pruning import ExpiredCheckpoint, LightenedCheckpoint, PruneReport, drop_optimizer, prune
    from reprise.management.summary import CheckpointStatus, CheckpointSummary
    from reprise.management.verification import VerifiedCheckpoint, verify
    from reprise.nested.loaded import LoadedState
    from reprise.nested.random_state import RandomState

    list = list_checkpoints

__version__ = "0.2.0"

# Without `list`: `from reprise import *` would shadow the builtin.
__all__ = [
    "AsyncSaver",
    "CheckpointContents",
    "CheckpointDifference",
    "CheckpointError",
    "CheckpointStatus",
    "CheckpointSummary",
    "ConfigError",
    "CopiedCheckpoint",
    "ExpiredCheckpoint",
    "FieldDifference",
    "FileSummary",
    "GatherReport",
    "GatherSource",
    "HostShare",
    "LightenedCheckpoint",
    "LoadedState",
    "LockError",
    "MismatchError",
    "PartialLoadError",
    "ProgressCallback",
    "PruneReport",
    "RandomState",
    "ReplicaError",
    "TensorDifference",
    "TensorSummary",
    "TrainerError",
    "UnreadableError",
    "VerifiedCheckpoint",
    "copy",
    "diff",
    "drop_optimizer",
    "gather",
    "latest",
    "load",
    "load_state_dict",
    "prune",
    "save",
    "save_state_dict",
    "show",
    "verify",
]

_NAMES = {
    "api": "load load_state_dict save save_state_dict",
    "async_saver": "AsyncSaver",
    "loading.newest": "latest",
    "management.comparison": "CheckpointDifference FieldDifference TensorDifference diff",
    "management.contents": "CheckpointContents FileSummary TensorSummary show",
    "management.copying": "CopiedCheckpoint copy",
    "management.gathering": "GatherReport GatherSource gather",
    "management.host_share": "HostShare",
    "management.listing": "list_checkpoints",
    "management.pruning": "ExpiredCheckpoint LightenedCheckpoint PruneReport drop_optimizer prune",
    "management.summary": "CheckpointStatus CheckpointSummary",
    "management.verification": "VerifiedCheckpoint verify",
    "management.progress": "ProgressCallback",
    "nested.loaded": "LoadedState",
    "nested.random_state": "RandomState",
}
# Lazy, since the trainer imports submodules and needs few of these names.
_attribute = importer(__name__, _NAMES)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a function or class at its first use."""
        return _attribute("list_checkpoints" if name == "list" else name)


def __dir__() -> Iterable[str]:
    """Return the public names, whether imported yet or not."""
    return ["list", *__all__]
