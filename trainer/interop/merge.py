"""Merges a checkpoint's adapters into their base weights, bit for bit as PEFT's `merge_and_unload` does.

Source: `Linear.merge` and `get_delta_weight` in `peft.tuners.lora.layer`, PEFT 0.21.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from models.adapters import PREFIX, A, B, adapted_modules, adapter_tensors, base_of, scale_of
from models.config import ModelConfig
from models.families import spec_of
from reprise.errors import CheckpointError, MismatchError
from reprise.format import STATE
from reprise.loading import Checkpoint, Chooser, LoadSource, LoadTerms
from reprise.storage import CheckpointFolder, Files, is_file
from trainer.config.checkpoint import CheckpointSection
from trainer.config.load_saved import readable
from trainer.interop.hf.config import is_folder
from trainer.interop.hf.folder import weights_source
from trainer.interop.source import StateSource, holds_adapters, of_checkpoint
from trainer.interop.start import fit_weights, open_weights, weights_identity


def merged(checkpoint: Checkpoint, base: Path, *, averages: bool = False) -> StateSource:
    """Return base weights with a checkpoint's adapters added.

    Args:
        base: A run, a checkpoint, an iteration, a transformers model folder or an llm.c weight file.
        averages: Whether to use the adapters' moving averages.

    Raises:
        MismatchError: The checkpoint has no adapters, or they were trained on another base.
        CheckpointError: The checkpoint or the base is damaged.
    """
    if not holds_adapters(checkpoint):
        raise MismatchError("A checkpoint has no adapters to merge", where=checkpoint.path, fix="Omit the base.")
    adapters = of_checkpoint(checkpoint, averages=averages, takes_adapters=True)
    expected = checkpoint.state.get("base")
    if not (isinstance(expected, Mapping) and adapters.model.is_adapted):
        raise CheckpointError(
            "The adapter checkpoint does not describe its adapters or its base", where=checkpoint.path / STATE
        )
    weights, identity = _open_base(base, adapters.model, expected.get("xxh3_64"), checkpoint.files)
    if identity != dict(expected):
        raise MismatchError(
            "The adapters were trained on a different base",
            where=base,
            expected=f"weights of {expected.get('format')}, digest {expected.get('xxh3_64')}",
            found=f"weights of {identity['format']}, digest {identity['xxh3_64']}",
            fix="Pass the base weights that the adapters were trained on.",
        )
    model, modules = adapters.model, frozenset(adapted_modules(adapters.model))

    def read(name: str) -> torch.Tensor:
        weight, module = weights.read(name), name.removesuffix(".weight")
        if module not in modules:
            return weight
        # PEFT and a run open adapters in float32, even if a weights-only save has another dtype.
        first, second = (adapters.read(f"{PREFIX}{module}{factor}").float() for factor in (A, B))
        product = second @ first
        oriented = product.T if spec_of(model).fan_in_fan_out else product
        return weight + oriented * scale_of(model)

    tokenizer = adapters.tokenizer or weights.tokenizer
    return replace(adapters, model=base_of(model), has_optimizer=False, read=read, tokenizer=tokenizer)


def check_adapters(checkpoint: Checkpoint) -> None:
    """Read all adapters in a checkpoint, so a later damage error concerns the base.

    Raises:
        CheckpointError: The adapters are damaged.
    """
    adapters = of_checkpoint(checkpoint, takes_adapters=True)
    for name in adapter_tensors(adapters.model):
        adapters.read(name)


def _open_base(path: Path, model: ModelConfig, digest: object, files: Files) -> tuple[StateSource, dict[str, str]]:
    """Return the base for adapters of `model`, and its identity as recorded in `trainer_state.json`.

    Args:
        digest: The training base's digest. In a run, the iteration with this digest is the base.
    """
    if is_file(path) or is_folder(path):
        weights = fit_weights(open_weights(path), base_of(model), CheckpointSection(finetune=True))
        return weights_source(weights), weights_identity(weights)
    source = LoadSource.named(path, terms=LoadTerms("the base"))
    folder = CheckpointFolder(source.path, files)
    same = (each for each in readable(folder, reversed(folder.committed())) if each.digest == digest)
    checkpoint = next(same, None) or Chooser(source, files).open()
    return of_checkpoint(checkpoint), {"format": "reprise", "xxh3_64": checkpoint.digest}
