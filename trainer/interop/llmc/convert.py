"""Imports and exports weight files of llm.c. `checkpoint.load` starts a run from such a file directly."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from tqdm import tqdm

from models import families
from models.config import ModelConfig
from reprise.errors import ConfigError, MismatchError
from reprise.reading import Checkpoint
from trainer.interop.formats import ExportOptions, Format, ImportOptions
from trainer.interop.llmc.contents import FAMILIES, HEADER_BYTES, VERSIONS, LlmcTensor
from trainer.interop.llmc.file import HEADER, open_file, read_whole
from trainer.interop.new_output import new_output
from trainer.interop.source import StateSource, of_checkpoint
from trainer.interop.tensor_files import blocks_of


def read_source(path: Path, options: ImportOptions) -> StateSource:
    """Open a weight file, to be read tensor by tensor.

    Raises:
        CheckpointError: if the file is not a weight file, is truncated, or describes no valid model.
    """
    file = open_file(path, options.files)
    return StateSource(file.model, 0, has_optimizer=False, read=lambda name: read_whole(file, name))


def write(checkpoint: Checkpoint, out: Path, options: ExportOptions) -> None:
    """Write the weights of a checkpoint as a file, tensor by tensor.

    Raises:
        MismatchError: if the format cannot express the model or the dtype.
        ConfigError: if a tokenizer is wanted.
        CheckpointError: if `out` exists, the checkpoint is damaged, or the file system fails.
    """
    files, source = options.files, of_checkpoint(checkpoint)
    if options.tokenizer is not None:
        raise ConfigError("A file of weights has no room for a tokenizer", where=out, fix="Leave --tokenizer out.")
    header, parts = _describing(source.model, options.dtype, where=checkpoint.path)
    total = HEADER_BYTES + sum(math.prod(part.shape) for part in parts) * options.dtype.itemsize
    aliases = families.aliases(source.model)
    bar = tqdm(total=total, desc=out.name, unit="B", unit_scale=True, disable=None, leave=False)
    with new_output(out, files) as partial, bar:
        descriptor = files.open_for_writing(partial)
        try:
            files.reserve(descriptor, total)
            files.write(descriptor, [memoryview(HEADER.pack(*header, *[0] * (256 - len(header))))], offset=0)
            at = HEADER_BYTES
            for part in parts:
                tensor = part.to_theirs(source.read(aliases.get(part.name, part.name)))
                end = at + math.prod(part.shape) * options.dtype.itemsize  # padding rows stay zero
                for block in blocks_of(tensor, options.dtype, where=part.name):
                    files.write(descriptor, [block], offset=at)
                    at += block.nbytes
                    bar.update(block.nbytes)
                at = end
            files.sync(descriptor)
        finally:
            files.close(descriptor)


def _describing(model: ModelConfig, dtype: torch.dtype, *, where: Path) -> tuple[list[int], list[LlmcTensor]]:
    """Return the header of a file, without the zeros at its end, and its tensors."""
    version = {kind: number for number, kind in VERSIONS.items()}.get(dtype)
    family = FAMILIES.get(model.family)
    sizes, problems = ([], [_unknown(model)]) if family is None else family.write_header(model)
    if version is None:
        problems.append(f"{dtype}: a file has float32 or bfloat16")
    if family is None or version is None or problems:
        raise MismatchError("llm.c has no file for such a model", where=where, found="; ".join(problems))
    return [family.magic, version, *sizes], list(family.parts(model, sizes[5]))


def _unknown(model: ModelConfig) -> str:
    supported = " and ".join(family.value for family in FAMILIES)
    return f"model.family={model.family.value}: llm.c has {supported}"


FORMAT = Format("a file of weights of llm.c (GPT-2 or LLaMA-3)", read_source, write, names_model=True)
