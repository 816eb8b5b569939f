"""Files without state in a checkpoint's folder: its own, equal files of another checkpoint, and foreign files."""

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
    """Return the path of a file without state of the checkpoint; None if its bytes are in no checkpoint.

    Where the checkpoint's own is missing or damaged, an equal file of another checkpoint beside it takes its place.
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
    """Return foreign files in the folder preferred by transformers' `from_pretrained` to the checkpoint's own.

    As of transformers 5.23, `model.safetensors` takes precedence over the index of several files, and with PEFT
    installed `adapter_config.json` redirects to another folder.

    Raises:
        UnreadableError: if the folder cannot be listed at the moment.
    """
    names = []
    for name in _MISLEADING:
        path = checkpoint.path / name
        try:
            if name not in checkpoint.manifest.files and path.is_file():
                names.append(name)
        except OSError as error:
            raise unreadable(error, where=path) from error
    return names
