"""Saves and restores a training run: to a shared folder, to each host's disk, or its weights alone.

Each is imported at its first use: no run has all of them, and the mirror of a run needs no torch.
"""

from typing import TYPE_CHECKING

from reprise.lazy import importer

if TYPE_CHECKING:
    from reprise.checkpointer import Checkpointer
    from reprise.format.mirror_record import MirrorRule
    from reprise.loading.restorer import Restored, Restorer
    from reprise.local.host_folders import HostFolders
    from reprise.local_checkpointer import LocalCheckpointer, LocalPolicy
    from reprise.policy import Retention, SavePolicy, SaveReport
    from reprise.saving.column_sharing import SharedMemory
    from reprise.saving.one_process import write_checkpoint
    from reprise.stores.extra import probe_store
    from reprise.stores.mirror_process import MirrorProcess, mirror_rule, mirror_run
    from reprise.stores.peers import Peers, address_of_this_host, listen
    from reprise.weights_checkpointer import WeightsCheckpointer, WeightsPolicy

__all__ = [
    "Checkpointer",
    "HostFolders",
    "LocalCheckpointer",
    "LocalPolicy",
    "MirrorProcess",
    "MirrorRule",
    "Peers",
    "Restored",
    "Restorer",
    "Retention",
    "SavePolicy",
    "SaveReport",
    "SharedMemory",
    "WeightsCheckpointer",
    "WeightsPolicy",
    "address_of_this_host",
    "listen",
    "mirror_rule",
    "mirror_run",
    "probe_store",
    "write_checkpoint",
]

_MODULES = {
    "Checkpointer": "reprise.checkpointer",
    "HostFolders": "reprise.local.host_folders",
    "LocalCheckpointer": "reprise.local_checkpointer",
    "LocalPolicy": "reprise.local_checkpointer",
    "MirrorProcess": "reprise.stores.mirror_process",
    "MirrorRule": "reprise.format.mirror_record",
    "Peers": "reprise.stores.peers",
    "Restored": "reprise.loading.restorer",
    "Restorer": "reprise.loading.restorer",
    "Retention": "reprise.policy",
    "SavePolicy": "reprise.policy",
    "SaveReport": "reprise.policy",
    "SharedMemory": "reprise.saving.column_sharing",
    "WeightsCheckpointer": "reprise.weights_checkpointer",
    "WeightsPolicy": "reprise.weights_checkpointer",
    "address_of_this_host": "reprise.stores.peers",
    "listen": "reprise.stores.peers",
    "mirror_rule": "reprise.stores.mirror_process",
    "mirror_run": "reprise.stores.mirror_process",
    "probe_store": "reprise.stores.extra",
    "write_checkpoint": "reprise.saving.one_process",
}


if not TYPE_CHECKING:
    __getattr__ = importer(__name__, _MODULES)
