"""Opens a weight file of llm.c: its model, and the offset of each tensor."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from models.config import ModelConfig
from models.families import problems as model_problems
from reprise.errors import CheckpointError
from reprise.files import Files
from reprise.reading import open_tensor_file
from trainer.interop.llmc.contents import HEADER_BYTES, MAGICS, VERSIONS, LlmcTensor

HEADER = struct.Struct("<256i")
WEIGHTS = f"a magic number of {' or '.join(map(str, MAGICS))}"
# First bytes of other formats, to name them in an error.
_OTHERS = (
    (b"PK\x03\x04", "a zip archive, such as torch.save writes"),
    (b"\x80", "a pickle"),
    (b"GGUF", "a GGUF file"),
    (b"version https://git-lfs", "a Git-LFS pointer; `git lfs pull` downloads the file"),
    (b"{", "JSON; name its folder"),
    (struct.pack("<i", 20240520), "tokens, which data.train reads"),
    (struct.pack("<i", 20240801), "tokens, which data.train reads"),
    (struct.pack("<i", 20240527), "optimizer state of llm.c, which is not supported"),
)
_SAFETENSORS = b'{"'  # behind eight bytes of length


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A file with a valid header and size; `parts` maps stored names to tensors and their offsets in bytes."""

    path: Path
    files: Files
    model: ModelConfig
    dtype: torch.dtype
    parts: Mapping[str, tuple[LlmcTensor, int]]


def foreign(path: Path) -> str | None:
    """Return the format of a file by its first bytes, or None if it is a weight file of llm.c.

    Raises:
        OSError: if it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(16)
    return None if int.from_bytes(data[:4], "little") in MAGICS else _format_of(data)


def open_file(path: Path, files: Files) -> WeightsFile:
    """Read the header of a weight file and check the size of the file against it.

    Raises:
        CheckpointError: if the file is not a weight file, is truncated, or describes no valid model.
    """
    try:
        size = files.size(path.resolve())
    except OSError as error:
        raise CheckpointError("A weight file cannot be read", where=path, found=error.strerror) from error
    header = _read_header(path, files, size)
    dtype = VERSIONS[header[1]]
    model, parts = _described(path, header, size, dtype)
    offsets, at = dict[str, tuple[LlmcTensor, int]](), HEADER_BYTES
    for part in parts:
        offsets[part.name] = (part, at)
        at += math.prod(part.shape) * dtype.itemsize
    return WeightsFile(path, files, model, dtype, offsets)


def read_whole(file: WeightsFile, name: str) -> torch.Tensor:
    """Return a tensor in the stored layout, in the file's dtype, without the padding rows of the vocabulary."""
    part, offset = file.parts[name]
    tensor = torch.empty((part.rows, *part.shape[1:]), dtype=file.dtype)
    with open_tensor_file(file.files, file.path.resolve()) as source:
        source.read(memoryview(tensor.view(-1).view(torch.uint8).numpy()), offset)  # type: ignore[arg-type]
    return part.to_ours(tensor)


def _read_header(path: Path, files: Files, size: int) -> list[int]:
    data = bytearray(min(size, HEADER_BYTES))
    with open_tensor_file(files, path.resolve()) as file:
        file.read(memoryview(data), 0)
    if int.from_bytes(data[:4], "little") not in MAGICS:
        raise CheckpointError(
            "A file is not a weight file of llm.c", where=path, expected=WEIGHTS, found=_format_of(data)
        )
    if size < HEADER_BYTES:
        raise CheckpointError(
            "A file is too short for a header of llm.c", where=path, expected=f"{HEADER_BYTES} B", found=f"{size} B"
        )
    header = list(HEADER.unpack(data))
    if header[1] not in VERSIONS:
        raise CheckpointError(
            "A file of weights has another version",
            where=path,
            expected=" or ".join(f"{number} ({dtype})" for number, dtype in VERSIONS.items()),
            found=header[1],
        )
    return header


def _format_of(data: bytes | bytearray) -> str:
    """Return the format of a file by its first bytes."""
    if data[8:10] == _SAFETENSORS:
        return "a safetensors file; name its folder if that holds config.json"
    formats = (name for begin, name in _OTHERS if data.startswith(begin))
    return next(formats, f"{int.from_bytes(data[:4], 'little')}, of the bytes {data[:8].hex(' ') or 'none'}")


def _described(
    path: Path, header: Sequence[int], size: int, dtype: torch.dtype
) -> tuple[ModelConfig, list[LlmcTensor]]:
    """Return the model of a file and its tensors; refuse a file of another size."""
    family = MAGICS[header[0]]
    problems = family.problems_of_header(header)
    items, trailing_bytes = divmod(size - HEADER_BYTES, dtype.itemsize)
    model = None
    if not problems:
        model = family.read_model(header, items)
        problems = [] if model is None else model_problems(model)
    if problems:
        raise CheckpointError("A file of weights describes no model", where=path, found="; ".join(problems))
    parts = [] if model is None else list(family.parts(model, header[7]))
    expected = sum(math.prod(part.shape) for part in parts)
    if model is None or trailing_bytes or expected != items:
        expected_size = (
            f"{HEADER_BYTES + expected * dtype.itemsize} B" if parts else "a size with a whole number of columns"
        )
        raise CheckpointError(
            "A file of weights has another size", where=path, expected=expected_size, found=f"{size} B"
        )
    return model, parts
