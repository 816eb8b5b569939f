"""Recognizes Megatron-LM, Megatron-Core and NeMo checkpoints where another format is expected."""

from __future__ import annotations

from pathlib import Path

from reprise.errors import MismatchError
from reprise.storage import is_dir, is_file, matching
from trainer.interop.formats import few

_METADATA, _BACKEND = "metadata.json", b"sharded_backend"  # of megatron/core/dist_checkpointing/core.py
_LEGACY = "model_optim_rng.pt"  # in `mp_rank_*`, of Megatron-LM, --ckpt-format torch


def refuse_megatron(path: Path) -> None:
    """Refuse a Megatron checkpoint, or a folder containing some, without unpickling anything.

    Raises:
        MismatchError: It is a Megatron checkpoint. The error has the import command.
    """
    folders = [child for child in (path, *path.iterdir()) if _is_megatrons(child)] if is_dir(path) else []
    if folders:
        raise MismatchError(
            "The folder holds a Megatron checkpoint, which must be imported first",
            where=path,
            found=few(folder.name for folder in folders),
            fix=f"Run `reprise convert import megatron {path} FOLDER --trust-pickle`, and load FOLDER.",
        )


def _is_megatrons(path: Path) -> bool:
    metadata = path / _METADATA
    has_backend = is_file(metadata) and _BACKEND in metadata.read_bytes()
    return has_backend or any(is_file(folder / _LEGACY) for folder in matching(path, "mp_rank_*"))
