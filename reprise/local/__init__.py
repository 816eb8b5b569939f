"""Local checkpoints: a folder on each host, copies on its neighbors, and loads from wherever a part lies."""

from typing import TYPE_CHECKING

from reprise.lazy import importer

if TYPE_CHECKING:
    from reprise.local.host_folders import HostFolders as HostFolders
    from reprise.local.local_checkpointer import LocalCheckpointer as LocalCheckpointer

_NAMES = {
    "local.host_folders": "HostFolders",
    "local.local_checkpointer": "LocalCheckpointer",
}

if not TYPE_CHECKING:
    __getattr__ = importer(__name__, _NAMES)
