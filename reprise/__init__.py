"""A checkpoint library: whole logical tensors, written in place by all ranks, committed by a single rename.

    from reprise import save, load                          a model and its optimizer
    from reprise import save_state_dict, load_state_dict    a nested state dict, on any group of ranks
    from reprise import AsyncSaver                          both in the background
    from reprise import latest                              the path of the newest checkpoint

    import reprise                                          what is done with saved checkpoints:
    reprise.list, reprise.show                              what a folder and a checkpoint hold
    reprise.verify, reprise.diff                            every byte; two checkpoints, tensor by tensor
    reprise.prune, reprise.drop_optimizer                   delete old ones, or their optimizer's state
    reprise.gather                                          join the folders of hosts
    reprise.copy                                            into an object store, out of it, from one to another

It needs nothing of the trainer around it and works on any torch model and optimizer.
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
    from reprise.management.host_share import HostPieces, HostShare
    from reprise.management.listing import list_checkpoints
    from reprise.management.progress import ProgressCallback
    from reprise.management.pruning import ExpiredCheckpoint, LightenedCheckpoint, PruneReport, drop_optimizer, prune
    from reprise.management.summary import CheckpointStatus, CheckpointSummary
    from reprise.management.verification import VerifiedCheckpoint, verify
    from reprise.nested.loaded import LoadedState
    from reprise.nested.random_state import RandomState

    list = list_checkpoints

__version__ = "0.2.0"

# Without `list`, which `from reprise import *` would put before Python's own.
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
    "HostPieces",
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
    "management.host_share": "HostPieces HostShare",
    "management.listing": "list_checkpoints",
    "management.pruning": "ExpiredCheckpoint LightenedCheckpoint PruneReport drop_optimizer prune",
    "management.summary": "CheckpointStatus CheckpointSummary",
    "management.verification": "VerifiedCheckpoint verify",
    "management.progress": "ProgressCallback",
    "nested.loaded": "LoadedState",
    "nested.random_state": "RandomState",
}
# The trainer, whose modules lie beneath, needs none of most.
_attribute = importer(__name__, _NAMES)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a function or class at its first use."""
        return _attribute("list_checkpoints" if name == "list" else name)


def __dir__() -> Iterable[str]:
    """Return the public names, also before their first use."""
    return ["list", *__all__]
