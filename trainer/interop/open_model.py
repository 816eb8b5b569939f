"""Opens a model for inference, unsharded on a single device, from a run, a checkpoint or a transformers folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from models import families
from models.build import build_model
from models.network import Model
from reprise.errors import CheckpointError
from reprise.loading import Chooser, LoadSource
from reprise.storage import FILE_SYSTEM, Files
from trainer.interop.hf.config import is_folder
from trainer.interop.hf.folder import open_folder, weights_source
from trainer.interop.merge import check_adapters, merged
from trainer.interop.source import StateSource, of_checkpoint


def open_model(
    path: Path,
    device: torch.device,
    base: Path | None = None,
    files: Files = FILE_SYSTEM,
    *,
    averages: bool = False,
) -> tuple[Model, Path]:
    """Return a model in float32, and its folder.

    Args:
        path: A run or checkpoint folder, for its newest valid checkpoint; an iteration; or a folder written by
            transformers' `save_pretrained`.
        base: The base weights beneath the checkpoint's adapters, which are added to them. None for a complete model.
        files: The store containing both.
        averages: Whether to use a checkpoint's moving averages.

    Raises:
        TrainerError: There is no model, it is damaged, or its family is not supported.
    """
    if is_folder(path) and not averages:
        source = weights_source(open_folder(path))
        return _filled(source, device), path
    chooser = Chooser(LoadSource.named(path), files)
    while True:
        checkpoint = chooser.open()
        try:
            if base is not None:
                check_adapters(checkpoint)
                break
            source = of_checkpoint(checkpoint, averages=averages)
            return _filled(source, device), checkpoint.path
        except CheckpointError as error:  # every block is verified as it is read: an older checkpoint may be intact
            chooser.skip(error)
    source = merged(checkpoint, base, averages=averages)
    return _filled(source, device), checkpoint.path


def _filled(source: StateSource, device: torch.device) -> Model:
    config = replace(source.model, pad_vocab_multiple=1)
    with torch.device("meta"):
        model = build_model(config)
    model.to_empty(device=device)
    model.tie_weights()
    names = families.aliases(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.read(names.get(name, name)).reshape(parameter.shape))
    return model.eval()
