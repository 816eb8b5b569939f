"""llm.c's weight files, in and out. What is in them for each model is told in `llmc_models.py`."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

import models
from models import Family, ModelConfig
from trainer.checkpoint.files import Files
from trainer.checkpoint.reader import Checkpoint, opened
from trainer.convert import llmc_models
from trainer.convert.appearing import appearing
from trainer.convert.formats import Asked, Format, Wanted
from trainer.convert.llmc_models import HEADER_BYTES, MAGICS, VERSIONS, Part
from trainer.convert.source import Source, of_checkpoint
from trainer.convert.tensor_files import blocks_of
from trainer.errors import CheckpointError, ConfigError, MismatchError

_HEADER = struct.Struct("<256i")


def read_source(path: Path, _: Asked) -> Source:
    """Open a file of weights; they are read tensor by tensor.

    Raises:
        CheckpointError: for a file that is none, was cut off, or describes no model.
    """
    files = Files()
    try:
        size = files.size(path.resolve())
    except OSError as error:
        raise CheckpointError("A file of weights cannot be read", where=path, found=error.strerror) from error
    header = _read_header(path, files, size)
    dtype = VERSIONS[header[1]]
    model, parts = _described(path, header, size, dtype)
    offsets, at = dict[str, tuple[Part, int]](), HEADER_BYTES
    for part in parts:
        offsets[part.name] = (part, at)
        at += math.prod(part.shape) * dtype.itemsize

    def read(name: str) -> torch.Tensor:
        part, offset = offsets[name]
        tensor = torch.empty((part.rows, *part.shape[1:]), dtype=dtype)
        with opened(files, path.resolve()) as file:
            file.read(memoryview(tensor.view(-1).view(torch.uint8).numpy()), offset)  # type: ignore[arg-type]
        return part.to_ours(tensor)

    return Source(model, 0, has_optimizer=False, read=read)


def write(checkpoint: Checkpoint, out: Path, wanted: Wanted) -> None:
    """Write the weights of a checkpoint as a file, tensor by tensor.

    Raises:
        MismatchError: for a model that such a file cannot describe, or a dtype that it cannot have.
        ConfigError: if a tokenizer is wanted.
        CheckpointError: if `out` is there, the checkpoint is damaged, or the file system fails.
    """
    files, source = Files(), of_checkpoint(checkpoint)
    if wanted.tokenizer is not None:
        raise ConfigError("A file of weights has no room for a tokenizer", where=out, fix="Leave --tokenizer out.")
    header, parts = _describing(source.model, wanted.dtype, where=checkpoint.path)
    total = HEADER_BYTES + sum(math.prod(part.shape) for part in parts) * wanted.dtype.itemsize
    aliases = models.aliases(source.model)
    bar = tqdm(total=total, desc=out.name, unit="B", unit_scale=True, disable=None, leave=False)
    with appearing(out, files) as partial, bar:
        descriptor = files.open_for_writing(partial)
        try:
            files.reserve(descriptor, total)
            files.write(descriptor, [memoryview(_HEADER.pack(*header, *[0] * (256 - len(header))))], offset=0)
            at = HEADER_BYTES
            for part in parts:
                tensor = part.to_theirs(source.read(aliases.get(part.name, part.name)))
                end = at + math.prod(part.shape) * wanted.dtype.itemsize  # rows that pad a table stay zero
                for block in blocks_of(tensor, wanted.dtype, where=part.name):
                    files.write(descriptor, [block], offset=at)
                    at += block.nbytes
                    bar.update(block.nbytes)
                at = end
            files.sync(descriptor)
        finally:
            files.close(descriptor)


def _read_header(path: Path, files: Files, size: int) -> list[int]:
    if size < HEADER_BYTES:
        raise CheckpointError(
            "A file is too short for a header of llm.c", where=path, expected=f"{HEADER_BYTES} B", found=f"{size} B"
        )
    data = bytearray(HEADER_BYTES)
    with opened(files, path.resolve()) as file:
        file.read(memoryview(data), 0)
    header = list(_HEADER.unpack(data))
    if header[0] not in MAGICS:
        raise CheckpointError(
            "A file is none of llm.c's weights",
            where=path,
            expected=f"a magic number of {' or '.join(map(str, MAGICS))}",
            found=header[0],
        )
    if header[1] not in VERSIONS:
        raise CheckpointError(
            "A file of weights has another version",
            where=path,
            expected=" or ".join(f"{number} ({dtype})" for number, dtype in VERSIONS.items()),
            found=header[1],
        )
    return header


def _described(path: Path, header: Sequence[int], size: int, dtype: torch.dtype) -> tuple[ModelConfig, list[Part]]:
    """Return the model of a file and its tensors, after checking that the file has their size."""
    family = MAGICS[header[0]]
    found = llmc_models.problems_of_header(header, family)
    items, odd = divmod(size - HEADER_BYTES, dtype.itemsize)
    model = None
    if not found:
        model = llmc_models.gpt2_model(header) if family is Family.gpt2 else llmc_models.llama3_model(header, items)
        found = [] if model is None else models.problems(model)
    if found:
        raise CheckpointError("A file of weights describes no model", where=path, found="; ".join(found))
    parts = [] if model is None else _parts(model, header[7])
    expected = sum(math.prod(part.shape) for part in parts)
    if model is None or odd or expected != items:
        wanted = f"{HEADER_BYTES + expected * dtype.itemsize} B" if parts else "what a whole number of columns makes"
        raise CheckpointError("A file of weights has another size", where=path, expected=wanted, found=f"{size} B")
    return model, parts


def _parts(model: ModelConfig, padded_vocab_size: int) -> list[Part]:
    match model.family:
        case Family.gpt2:
            return list(llmc_models.gpt2_parts(model, padded_vocab_size))
        case Family.llama3:
            return list(llmc_models.llama3_parts(model))


def _describing(model: ModelConfig, dtype: torch.dtype, *, where: Path) -> tuple[list[int], list[Part]]:
    """Return the header of a file, but for the zeros at its end, and its tensors."""
    version = {kind: number for number, kind in VERSIONS.items()}.get(dtype)
    (magic,) = [number for number, family in MAGICS.items() if family is model.family]
    write_header = llmc_models.gpt2_header if model.family is Family.gpt2 else llmc_models.llama3_header
    sizes, found = write_header(model)
    if version is None:
        found.append(f"{dtype}: a file has float32 or bfloat16")
    if version is None or found:
        raise MismatchError("llm.c has no file for such a model", where=where, found="; ".join(found))
    return [magic, version, *sizes], _parts(model, sizes[5])


FORMAT = Format("a file of weights of llm.c (GPT-2 or LLaMA-3)", read_source, write, names_model=True)
