"""The newest checkpoint of a folder, by the names in it alone."""

from __future__ import annotations

from pathlib import Path

from reprise.format.names import MANIFEST
from reprise.storage.files import Files
from reprise.storage.folder import CheckpointFolder
from reprise.storage.paths import exists, is_dir, lexists, matching
from reprise.stores.locations import files_of, location


def latest(folder: str | Path) -> Path | None:
    """Return the path of the newest committed checkpoint in a folder; None without one, or without the folder.

    This rank's view of the file system, without messages: call it on a single rank where ranks must agree. Only names
    are read. `load` given the folder checks the content too, and falls back to an older checkpoint from a damaged
    checkpoint.
    """
    path = location(folder)
    checkpoints = CheckpointFolder(path, files_of(path))
    committed = checkpoints.committed()
    return checkpoints.iteration(committed[-1]) if committed else None


_PROGRAMS = {".metadata": "torch.distributed.checkpoint", "metadata.pkl": "torch_checkpointing"}


def has_no_checkpoint(path: Path, files: Files) -> bool:
    """Return whether a load from `path` has nothing to choose from: no folder, or a folder without any iteration.

    A folder of another program is not such a one: to begin afresh beside its checkpoint would be a surprise.

    Raises:
        OSError: if the folder cannot be listed.
    """
    if not lexists(path):
        return True
    checkpoints = CheckpointFolder(path, files_of(path, files))
    is_checkpoint = exists(path / MANIFEST)
    is_empty = not is_checkpoint and not checkpoints.committed() and not checkpoints.non_folders()
    return is_dir(path) and is_empty and not advice_on_other_program(path)


def advice_on_other_program(path: Path) -> str:
    """Return how to bring in a folder of another program, or of its checkpoints; empty for any other folder."""
    for name, program in _PROGRAMS.items():
        for file in (*matching(path, name), *reversed(matching(path, f"*/{name}"))):
            command = f"reprise convert import dcp {file.parent} FOLDER --trust-pickle"
            return (
                f"{file.parent} is {program}'s: `{command}` brings in GPT-2, LLaMA-3 and Qwen3; fill any other model "
                "with its program, and save it here"
            )
    return ""
