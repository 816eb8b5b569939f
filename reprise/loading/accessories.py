"""Files in a checkpoint's folder that hold no state: its own, equal ones of another checkpoint, and foreign ones."""

from __future__ import annotations

import logging
from pathlib import Path

from reprise import json_file
from reprise.format.manifest import digest_of
from reprise.loading.reader import Checkpoint
from reprise.regular_file import read_regular
from reprise.storage.folder import iteration_of
from reprise.storage.patience import unreadable

_log = logging.getLogger(__name__)

_MISLEADING = ("model.safetensors", "adapter_config.json")


def find_accessory(checkpoint: Checkpoint, name: str) -> Path | None:
    """Return the path of a file of the checkpoint that holds no state; None if its bytes are in no checkpoint.

    Where the checkpoint's own is missing or damaged, an equal one of another checkpoint in its folder takes its place.
    """
    entry = checkpoint.manifest.files.get(name)
    if entry is None or name not in checkpoint.lacking:
        return None if entry is None else checkpoint.path / name
    for folder in sorted(checkpoint.path.parent.glob("iter_*"), reverse=True):
        path = folder / name
        if iteration_of(folder) is None or folder == checkpoint.path:
            continue
        try:
            is_equal = digest_of(read_regular(path, limit_bytes=json_file.MAX_BYTES)) == entry.digest
        except OSError:
            continue
        if is_equal:
            _log.warning(f"{name} is taken from {folder}, where it is the same")
            return path
    return None


def misleading_files(checkpoint: Checkpoint) -> list[str]:
    """Return foreign files in the folder that transformers' `from_pretrained` prefers to the checkpoint's own.

    As of transformers 5.23, `model.safetensors` takes precedence over the index of several files, and with PEFT
    installed `adapter_config.json` redirects to another folder.

    Raises:
        UnreadableError: if the folder cannot be listed at the moment.
    """
    found = []
    for name in _MISLEADING:
        path = checkpoint.path / name
        try:
            if name not in checkpoint.manifest.files and path.is_file():
                found.append(name)
        except OSError as error:
            raise unreadable(error, where=path) from error
    return found
