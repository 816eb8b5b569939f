"""Saves and restores a training run: to a shared folder, to each host's disk, or its weights alone.

Savers of local checkpoints and of weights are imported at their first use, as most runs have neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from reprise.checkpointer import Checkpointer
from reprise.loading.restorer import Restored, Restorer
from reprise.policy import Retention, SavePolicy, SaveReport

if TYPE_CHECKING:
    from reprise.local.host_folders import HostFolders
    from reprise.local_checkpointer import LocalCheckpointer, LocalPolicy
    from reprise.weights_checkpointer import WeightsCheckpointer, WeightsPolicy

__all__ = [
    "Checkpointer",
    "HostFolders",
    "LocalCheckpointer",
    "LocalPolicy",
    "Restored",
    "Restorer",
    "Retention",
    "SavePolicy",
    "SaveReport",
    "WeightsCheckpointer",
    "WeightsPolicy",
]

_MODULES = {
    "HostFolders": "reprise.local.host_folders",
    "LocalCheckpointer": "reprise.local_checkpointer",
    "LocalPolicy": "reprise.local_checkpointer",
    "WeightsCheckpointer": "reprise.weights_checkpointer",
    "WeightsPolicy": "reprise.weights_checkpointer",
}


def __getattr__(name: str) -> object:
    """Import a saver or its policy at its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
