"""Finds the newest checkpoint in a folder by names alone."""

from __future__ import annotations

import shlex
from pathlib import Path

from reprise.format.names import MANIFEST
from reprise.storage.folder import CheckpointFolder
from reprise.storage.paths import exists, is_dir, lexists, matching
from reprise.stores.locations import files_of, location


def latest(folder: str | Path) -> Path | None:
    """Return the newest committed checkpoint's path in a folder. None if the folder is missing or has no checkpoint.

    The result is this rank's view of the file system, without communication: if ranks must agree, call it on a single
    rank. Only names are read. `load`, passed the folder, also checks the content, and falls back to an older checkpoint
    if the newest is damaged.

    Args:
        folder: The checkpoint folder. It may be a store URL.
    """
    path = location(folder)
    checkpoints = CheckpointFolder(path, files_of(path))
    committed = checkpoints.committed()
    return checkpoints.iteration(committed[-1]) if committed else None


# By the name of its table: a program, and files that lie beside the table.
_PROGRAMS = {
    ".metadata": ("torch.distributed.checkpoint", "__*_*.distcp"),
    "metadata.pkl": ("torch_checkpointing", "*_0.pt"),
}


def has_no_checkpoint(path: Path) -> bool:
    """Return whether a load from `path` has no candidates: no folder, or a folder without iterations.

    Another program's checkpoint folder returns False: starting from scratch beside its checkpoint would be a surprise.

    Raises:
        OSError: The folder cannot be listed.
    """
    if not lexists(path):
        return True
    checkpoints = CheckpointFolder(path, files_of(path))
    is_empty = not exists(path / MANIFEST) and not checkpoints.taken()
    return is_dir(path) and is_empty and not advice_on_other_program(path)


def advice_on_other_program(path: Path) -> str:
    """Return how to import another program's checkpoint, or a folder with such checkpoints. Otherwise empty."""
    for name, (program, companions) in _PROGRAMS.items():
        inner = [file for child in matching(path, "*") for file in matching(child, name)]
        below = sorted(inner, key=lambda file: (len(str(file)), file), reverse=True)
        for folder in (file.parent for file in (*matching(path, name), *below) if matching(file.parent, companions)):
            command = f"reprise convert import dcp {shlex.quote(str(folder))} FOLDER --trust-pickle"
            return (
                f"{folder} is {program}'s: `{command}` brings in GPT-2, LLaMA-3 and Qwen3; fill any other model "
                "with its program, and save it here"
            )
    return ""
