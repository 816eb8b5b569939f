"""Reads llm.c weight files for GPT-2 and LLaMA-3, to import them or to start a run on any topology.

Source: https://github.com/karpathy/llm.c, `write_model` and `write_tensors` in `train_gpt2.py` and `train_llama3.py`. A
file is a header with 256 int32 numbers, then contiguous tensors, grouped by kind across all layers. Linear weights are
[out, in]. The file is mapped: only the parts in use are read.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import torch

from models.config import Family, ModelConfig, RopeScaling
from models.families import parameter_count, spec_of
from models.families import problems as model_problems
from models.spec import OUTPUT
from reprise.errors import CheckpointError
from reprise.storage import open_regular
from trainer.interop.formats import Format, ImportOptions
from trainer.interop.hf.folder import weights_source
from trainer.interop.projections import halves_from_pairs
from trainer.interop.source import StateSource
from trainer.interop.stored import FileTensor, ForeignWeights

_HEADER = struct.Struct("<256i")
_VERSIONS = {3: torch.float32, 5: torch.bfloat16}
# By magic number: the family, and the sizes in a header, starting with its third number.
_FAMILIES = {
    20240326: (Family.gpt2, ("max_seq_len", "vocab_size", "n_layer", "n_head", "n_embd", "padded_vocab_size")),
    20240803: (Family.llama3, ("max_seq_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd")),
}
_WEIGHTS = f"a magic number of {' or '.join(map(str, _FAMILIES))}"
_TOKENS = (20240520, 20240801)
_MOST = 1 << 24
_NORM_EPS = 1e-5  # for both models, if the file does not state it
_SCALED = RopeScaling(8.0, 1.0, 4.0, 8192)  # the scaling that `use_scaled_rope` selects: LLaMA 3.1
# Token ids for the start and end of text, by vocabulary size.
_ENDS = {50257: (50256, 50256), 128256: (128000, 128001)}


# A block's tensors in groups: a file has a group for all layers before the next group. By default each is separate.
_ROTATED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")
_GROUPS = {
    Family.llama3: (
        ("input_layernorm.weight",),
        (*_ROTATED, "self_attn.v_proj.weight"),
        ("self_attn.o_proj.weight",),
        ("post_attention_layernorm.weight",),
        ("mlp.up_proj.weight",),
        ("mlp.gate_proj.weight",),
        ("mlp.down_proj.weight",),
    )
}


def _foreign(path: Path) -> str | None:
    """Describe a file by its first bytes. Return None for an llm.c weight file."""
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(16)
    number = int.from_bytes(data[:4], "little")
    if number in _FAMILIES:
        return None
    if number in _TOKENS:
        return "tokens, which data.train reads"
    if data[8:10] == b'{"':
        return "a safetensors file: pass its folder if that holds config.json"
    return f"{number}, bytes {data[:8].hex(' ') or 'none'}"


def open_file(path: Path) -> ForeignWeights:
    """Read a weight file's header and check the file size against it.

    Raises:
        CheckpointError: The file is not a weight file, is truncated, or describes no valid model.
    """
    try:
        problem, size = _foreign(path), path.stat().st_size
        if problem is None and size < _HEADER.size:
            problem = f"{size} B"
        if problem is not None:
            raise CheckpointError("The file is not an llm.c weight file", where=path, expected=_WEIGHTS, found=problem)
        data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except OSError as error:
        raise CheckpointError("A weight file cannot be read", where=path, found=error.strerror) from error
    header, content = list(_HEADER.unpack(data[: _HEADER.size].numpy().tobytes())), data[_HEADER.size :]
    family, names = _FAMILIES[header[0]]
    sizes = dict(zip(names, header[2:], strict=False))
    problems = [f"{name}={n}: must be 1 to {_MOST}" for name, n in sizes.items() if not 1 <= n <= _MOST]
    if header[1] not in _VERSIONS:
        problems.append(f"version {header[1]}: must be {' or '.join(map(str, _VERSIONS))}")
    rows = sizes.get("padded_vocab_size", sizes["vocab_size"])
    if rows < sizes["vocab_size"]:
        problems.append(f"padded_vocab_size={rows}: below vocab_size={sizes['vocab_size']}")
    if not problems:
        dtype = _VERSIONS[header[1]]
        model = _model(family, sizes, header, len(content) // dtype.itemsize)
        problems = model_problems(model)
    if problems:
        raise CheckpointError("A weight file describes no valid model", where=path, found="; ".join(problems))
    tensors, at = dict[str, FileTensor](), 0
    shapes = dict(_tensors(model, rows))
    expected = dtype.itemsize * sum(map(prod, shapes.values()))
    if expected != len(content):
        raise CheckpointError(
            "A weight file has the wrong size", where=path, expected=expected, found=f"{len(content)} B of tensors"
        )
    for name, shape in shapes.items():
        end = at + prod(shape) * dtype.itemsize
        tensors[name], at = _stored(name, content[at:end].view(dtype).view(shape), model), end
    return ForeignWeights(path, model, tensors, dict.fromkeys(tensors, path))


def read_source(path: Path, options: ImportOptions) -> StateSource:
    """Open a weight file, to be read tensor by tensor.

    Raises:
        CheckpointError: The file is not a weight file, is truncated, or describes no valid model.
    """
    del options  # a file is complete
    return weights_source(open_file(path))


def _stored(name: str, tensor: torch.Tensor, model: ModelConfig) -> FileTensor:
    """Return a tensor in the stored layout, without padding rows. It is a view of the file unless its rows move."""
    spec = spec_of(model)
    if name.endswith(_ROTATED):
        return FileTensor(tuple(tensor.shape), tensor.dtype, partial(halves_from_pairs, tensor, model.head_width))
    if name in (spec.embedding, OUTPUT):
        tensor = tensor[: model.vocab_size]
    elif tensor.dim() == 2 and name.startswith(spec.blocks) and spec.fan_in_fan_out:
        tensor = tensor.T
    return FileTensor.of(tensor)


def _model(family: Family, sizes: Mapping[str, int], header: Sequence[int], items: int) -> ModelConfig:
    """Return the model for a valid header.

    A LLaMA header holds a multiplier for the MLP width, which llm.c truncates to an integer. So the element count in
    the file determines the width.
    """
    vocab_size, n_head, n_embd = (sizes[name] for name in ("vocab_size", "n_head", "n_embd"))
    begin, end = _ENDS.get(vocab_size, (vocab_size - 1, vocab_size - 1))
    common = ModelConfig(
        family=family,
        n_layer=sizes["n_layer"],
        n_head=n_head,
        n_kv_head=sizes.get("n_kv_head", n_head),
        n_embd=n_embd,
        intermediate_size=4 * n_embd,
        vocab_size=vocab_size,
        max_position_embeddings=sizes["max_seq_len"],
        bos_token_id=begin,
        eos_token_id=end,
        norm_eps=_NORM_EPS,
    )
    if "n_kv_head" not in sizes:
        return common
    llama = replace(
        common,
        tie_word_embeddings=False,
        norm_eps=_number(header[10]) or _NORM_EPS,
        rope_theta=_number(header[11]) or 500000.0,
        rope_scaling=_SCALED if header[12] else None,
    )
    narrow, wide = (parameter_count(replace(llama, intermediate_size=width)) for width in (1, 2))
    return replace(llama, intermediate_size=1 + (items - narrow) // (wide - narrow))


def _number(bits: int) -> float:
    """Decode a number stored as an integer, as llm.c writes it, or as float32 bits, as other programs do."""
    if 0 <= bits < _MOST:
        return float(bits)
    number = np.frombuffer(struct.pack("<i", bits), dtype="<f4")[0]
    return float(str(number))  # the shortest decimal with these bits: 1e-5 and not its neighbor


def _tensors(model: ModelConfig, rows: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each tensor's name and its shape in a file, in order.

    Args:
        rows: Token table rows, with padding.
    """
    spec, table = spec_of(model), (rows, model.n_embd)
    block = {
        name: tensor.shape[::-1] if spec.fan_in_fan_out else tensor.shape for name, tensor in spec.block(model).items()
    }
    for name, tensor in spec.first(model).items():
        yield name, table if name == spec.embedding else tensor.shape
    for group in _GROUPS.get(model.family, [(name,) for name in block]):
        yield from ((f"{spec.blocks}.{layer}.{name}", block[name]) for layer in range(model.n_layer) for name in group)
    yield from ((name, tensor.shape) for name, tensor in spec.last(model).items())
    if not model.tie_word_embeddings:
        yield OUTPUT, table


FORMAT = Format("llm.c", "an llm.c weight file (GPT-2 or LLaMA-3)", read_source, takes_file=True)
