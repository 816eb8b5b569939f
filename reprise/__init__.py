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

from reprise import errors as errors  # an attribute, as its classes
from reprise.lazy import importer

if TYPE_CHECKING:
    from reprise.api import load as load
    from reprise.api import load_state_dict as load_state_dict
    from reprise.api import save as save
    from reprise.api import save_state_dict as save_state_dict
    from reprise.async_saver import AsyncSaver as AsyncSaver
    from reprise.errors import CheckpointError as CheckpointError
    from reprise.errors import ConfigError as ConfigError
    from reprise.errors import LockError as LockError
    from reprise.errors import MismatchError as MismatchError
    from reprise.errors import PartialLoadError as PartialLoadError
    from reprise.errors import ReplicaError as ReplicaError
    from reprise.errors import TrainerError as TrainerError
    from reprise.errors import UnreadableError as UnreadableError
    from reprise.loading.newest import latest as latest
    from reprise.management.comparison import CheckpointDifference as CheckpointDifference
    from reprise.management.comparison import FieldDifference as FieldDifference
    from reprise.management.comparison import TensorDifference as TensorDifference
    from reprise.management.comparison import diff as diff
    from reprise.management.contents import CheckpointContents as CheckpointContents
    from reprise.management.contents import FileSummary as FileSummary
    from reprise.management.contents import TensorSummary as TensorSummary
    from reprise.management.contents import show as show
    from reprise.management.copying import CopiedCheckpoint as CopiedCheckpoint
    from reprise.management.copying import copy as copy
    from reprise.management.gathering import GatherReport as GatherReport
    from reprise.management.gathering import GatherSource as GatherSource
    from reprise.management.gathering import gather as gather
    from reprise.management.host_share import HostShare as HostShare
    from reprise.management.listing import list_checkpoints
    from reprise.management.progress import ProgressCallback as ProgressCallback
    from reprise.management.pruning import ExpiredCheckpoint as ExpiredCheckpoint
    from reprise.management.pruning import LightenedCheckpoint as LightenedCheckpoint
    from reprise.management.pruning import PruneReport as PruneReport
    from reprise.management.pruning import drop_optimizer as drop_optimizer
    from reprise.management.pruning import prune as prune
    from reprise.management.summary import CheckpointStatus as CheckpointStatus
    from reprise.management.summary import CheckpointSummary as CheckpointSummary
    from reprise.management.verification import VerifiedCheckpoint as VerifiedCheckpoint
    from reprise.management.verification import verify as verify
    from reprise.nested.loaded import LoadedState as LoadedState
    from reprise.nested.random_state import RandomState as RandomState

    list = list_checkpoints

__version__ = "0.2.0"

_NAMES = {
    "api": "load load_state_dict save save_state_dict",
    "async_saver": "AsyncSaver",
    "errors": "CheckpointError ConfigError LockError MismatchError PartialLoadError ReplicaError TrainerError "
    "UnreadableError",
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
# Without `list`: `from reprise import *` would shadow the builtin.
__all__ = sorted({name for names in _NAMES.values() for name in names.split()} - {"list_checkpoints"})
# Lazy, since the trainer imports submodules and needs few of these names.
_attribute = importer(__name__, _NAMES)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a function or class at its first use."""
        return _attribute("list_checkpoints" if name == "list" else name)


def __dir__() -> Iterable[str]:
    """Return the public names, whether imported yet or not."""
    return ["list", *__all__]
