"""Recognizes Megatron-LM, Megatron-Core and NeMo checkpoints where another format is expected."""

from __future__ import annotations

from pathlib import Path

from reprise.errors import CheckpointError, MismatchError
from reprise.storage import is_dir, is_file, json_file, matching, shown
from trainer.interop.formats import few

_METADATA = "metadata.json"  # megatron/core/dist_checkpointing/core.py, CheckpointingConfig
_BACKEND = "sharded_backend"
_LEGACY = "mp_rank_*/model_optim_rng.pt"  # Megatron-LM, --ckpt-format torch


def refuse_megatron(path: Path) -> None:
    """Refuse a Megatron checkpoint, or a folder containing some, without unpickling anything.

    Raises:
        MismatchError: It is a Megatron checkpoint. The error has the import command.
    """
    if not is_dir(path):
        return
    form_of_folder = _form(path)
    below = {} if form_of_folder else {child.name: form for child in sorted(path.iterdir()) if (form := _form(child))}
    forms = [form_of_folder] if form_of_folder else [f"{name}: {form}" for name, form in below.items()]
    if not forms:
        return
    raise MismatchError(
        "The folder holds a Megatron checkpoint, which must be imported first",
        where=path,
        found=few(forms),
        fix=f"Run `reprise convert import megatron {path} FOLDER --trust-pickle`, and load FOLDER.",
    )


def _form(path: Path) -> str | None:
    """Return a Megatron checkpoint's form, or None for any other folder."""
    if is_file(path / _METADATA):
        try:
            backend = json_file.read(path / _METADATA).get(_BACKEND)
        except CheckpointError:
            backend = None
        if isinstance(backend, str):
            return f"megatron.core.dist_checkpointing, {_BACKEND} {shown(backend)} in {_METADATA}"
    if is_dir(path) and matching(path, _LEGACY):
        return "Megatron-LM's format `torch`, a folder mp_rank_* for each rank"
    return None
