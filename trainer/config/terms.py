"""Configuration keys for the checkpoint library's advice. The library knows only its own arguments."""

from __future__ import annotations

from reprise.loading import LoadTerms
from reprise.storage import FolderTerms

# How a run saves on hosts without a shared folder.
WAY_OUT = (
    "If the hosts share no folder, use local checkpoints: set checkpoint.local.dir=FOLDER on each host's own disk, and "
    "checkpoint.save=null."
)

_ANOTHER = "another folder with run.name or checkpoint.save"
SAVE = FolderTerms(_ANOTHER, "checkpoint.max_checkpoint_keep", WAY_OUT)
WEIGHTS = FolderTerms(_ANOTHER, "checkpoint.weights_keep", WAY_OUT)
LOCAL = FolderTerms("another folder with checkpoint.local.dir", "checkpoint.local.keep")
RUN = FolderTerms("another folder with run.name or run.dir")
LOAD = LoadTerms("checkpoint.load", "checkpoint.ckpt_step", "start over with checkpoint.load=none")
BASE = LoadTerms("checkpoint.base")
