"""Saves and restores a training run: to a shared folder, to each host's disk, or its weights alone.

Each is imported at its first use: no run has all of them, and the mirror of a run needs no torch.
"""

from typing import TYPE_CHECKING

from reprise.lazy import importer

if TYPE_CHECKING:
    from reprise.checkpointer import Checkpointer as Checkpointer
    from reprise.format.mirror_record import MirrorRule as MirrorRule
    from reprise.loading.restorer import Restored as Restored
    from reprise.loading.restorer import Restorer as Restorer
    from reprise.local.host_folders import HostFolders as HostFolders
    from reprise.local_checkpointer import LocalCheckpointer as LocalCheckpointer
    from reprise.local_checkpointer import LocalPolicy as LocalPolicy
    from reprise.policy import Retention as Retention
    from reprise.policy import SavePolicy as SavePolicy
    from reprise.policy import SaveReport as SaveReport
    from reprise.saving.column_sharing import SharedMemory as SharedMemory
    from reprise.saving.one_process import write_checkpoint as write_checkpoint
    from reprise.stores.mirror_process import MirrorProcess as MirrorProcess
    from reprise.stores.mirror_process import mirror_rule as mirror_rule
    from reprise.stores.mirror_process import mirror_run as mirror_run
    from reprise.stores.probe import probe_store as probe_store
    from reprise.weights_checkpointer import WeightsCheckpointer as WeightsCheckpointer
    from reprise.weights_checkpointer import WeightsPolicy as WeightsPolicy

_NAMES = {
    "checkpointer": ("Checkpointer",),
    "format.mirror_record": ("MirrorRule",),
    "loading.restorer": ("Restored", "Restorer"),
    "local.host_folders": ("HostFolders",),
    "local_checkpointer": ("LocalCheckpointer", "LocalPolicy"),
    "policy": ("Retention", "SavePolicy", "SaveReport"),
    "saving.column_sharing": ("SharedMemory",),
    "saving.one_process": ("write_checkpoint",),
    "stores.probe": ("probe_store",),
    "stores.mirror_process": ("MirrorProcess", "mirror_rule", "mirror_run"),
    "weights_checkpointer": ("WeightsCheckpointer", "WeightsPolicy"),
}

if not TYPE_CHECKING:
    __getattr__ = importer(__name__, _NAMES)
