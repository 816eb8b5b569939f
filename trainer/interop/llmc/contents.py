"""The headers of llm.c's weight files for GPT-2 and LLaMA-3, and the order of their tensors. Pure.

Source: https://github.com/karpathy/llm.c, `write_model` and `write_tensors` of `train_gpt2.py` and `train_llama3.py`. A
file is a header of 256 int32 and tensors without holes, all layers of a kind before the next kind. Weights of linear
layers are [out, in].
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch

from models.config import Activation, Family, ModelConfig, RopeScaling

HEADER_BYTES = 1024
VERSIONS = {3: torch.float32, 5: torch.bfloat16}
_PAD = 128  # rows of GPT-2's vocabulary are padded to a multiple of it
_MOST_LAYERS, _MOST = 10_000, 1 << 24
_NORM_EPS = 1e-5  # of both models, if the file does not have it
_SCALED = RopeScaling(8.0, 1.0, 4.0, 8192)  # the scaling that `use_scaled_rope` selects: LLaMA 3.1
_TOKENS = {50257: (50256, 50256), 128256: (128000, 128001)}  # begin and end of text, by the size of the vocabulary


class LlmcForm(Enum):
    """How a tensor in a file relates to ours."""

    plain = "plain"
    transposed = "transposed"  # GPT-2's Conv1D of transformers is [in, out]
    interleaved = "interleaved"  # rotary pairs are adjacent in a file, and halves of a head in stored tensors


@dataclass(frozen=True, slots=True)
class LlmcTensor:
    """A tensor in a file: its stored name, its shape in the file, and the number of leading rows stored.

    Args:
        heads: number of heads in its rows, for an interleaved tensor.
    """

    name: str
    shape: tuple[int, ...]
    rows: int
    form: LlmcForm = LlmcForm.plain
    heads: int = 0

    def to_ours(self, tensor: torch.Tensor) -> torch.Tensor:
        """Convert the stored rows, [rows, ...], to the stored layout."""
        match self.form:
            case LlmcForm.plain:
                return tensor
            case LlmcForm.transposed:
                return tensor.T
            case LlmcForm.interleaved:
                pairs = tensor.reshape(self.heads, -1, 2, tensor.shape[-1])
                return pairs.transpose(1, 2).reshape(tensor.shape)

    def to_theirs(self, tensor: torch.Tensor) -> torch.Tensor:
        """Convert from the stored layout; the inverse of `to_ours`."""
        if self.form is LlmcForm.interleaved:
            halves = tensor.reshape(self.heads, 2, -1, tensor.shape[-1])
            return halves.transpose(1, 2).reshape(tensor.shape)
        return self.to_ours(tensor)


def _gpt2_model(header: Sequence[int], _: int) -> ModelConfig:
    """Return the model of a valid header."""
    begin, end = _tokens(header[3])
    return ModelConfig(
        family=Family.gpt2,
        n_layer=header[4],
        n_head=header[5],
        n_kv_head=header[5],
        n_embd=header[6],
        intermediate_size=4 * header[6],
        vocab_size=header[3],
        max_position_embeddings=header[2],
        bos_token_id=begin,
        eos_token_id=end,
        norm_eps=_NORM_EPS,
    )


def _llama3_model(header: Sequence[int], items: int) -> ModelConfig | None:
    """Return the model of a sound header, with the MLP's width in a file of `items` numbers.

    The header holds a multiplier for the width, truncated to an integer by llm.c. None where no width fits.
    """
    vocab_size, n_layer, n_head, n_kv_head, n_embd = header[3:8]
    kv_width = n_embd // n_head * n_kv_head
    layer_items = items - 2 * vocab_size * n_embd - n_embd
    in_mlp = layer_items - n_layer * (2 * n_embd + (2 * n_embd + 2 * kv_width) * n_embd)
    width, remainder = divmod(in_mlp, 3 * n_layer * n_embd)
    if remainder or width < 1 or (header[9] > 0 and width % header[9]):
        return None
    begin, end = _tokens(vocab_size)
    return ModelConfig(
        family=Family.llama3,
        n_layer=n_layer,
        n_head=n_head,
        n_kv_head=n_kv_head,
        n_embd=n_embd,
        intermediate_size=width,
        vocab_size=vocab_size,
        max_position_embeddings=header[2],
        bos_token_id=begin,
        eos_token_id=end,
        tie_word_embeddings=False,
        norm_eps=_number(header[10]) or _NORM_EPS,
        rope_theta=_number(header[11]) or 500000.0,
        rope_scaling=_SCALED if header[12] else None,
    )


def _tokens(vocab_size: int) -> tuple[int, int]:
    return _TOKENS.get(vocab_size, (vocab_size - 1, vocab_size - 1))


def _number(bits: int) -> float:
    """Return a number from an integer, as written by llm.c, or from the bits of a float32, as written by others."""
    if 0 <= bits < _MOST:
        return float(bits)
    number = np.frombuffer(struct.pack("<i", bits), dtype="<f4")[0]
    return float(str(number))  # the shortest decimal that has these bits: 1e-5 and not its neighbour


def _bits(number: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def _gpt2_parts(model: ModelConfig, padded_vocab_size: int) -> Iterator[LlmcTensor]:
    """Yield the tensors of a GPT-2 file in order."""
    width, wide = model.n_embd, 4 * model.n_embd
    yield LlmcTensor("transformer.wte.weight", (padded_vocab_size, width), model.vocab_size)
    yield _plain("transformer.wpe.weight", model.max_position_embeddings, width)
    for name, *shape in (
        ("ln_1.weight", width),
        ("ln_1.bias", width),
        ("attn.c_attn.weight", 3 * width, width),
        ("attn.c_attn.bias", 3 * width),
        ("attn.c_proj.weight", width, width),
        ("attn.c_proj.bias", width),
        ("ln_2.weight", width),
        ("ln_2.bias", width),
        ("mlp.c_fc.weight", wide, width),
        ("mlp.c_fc.bias", wide),
        ("mlp.c_proj.weight", width, wide),
        ("mlp.c_proj.bias", width),
    ):
        form = LlmcForm.transposed if len(shape) == 2 else LlmcForm.plain
        for layer in range(model.n_layer):
            yield LlmcTensor(f"transformer.h.{layer}.{name}", tuple(shape), shape[0], form)
    yield _plain("transformer.ln_f.weight", width)
    yield _plain("transformer.ln_f.bias", width)


def _llama3_parts(model: ModelConfig, _: int) -> Iterator[LlmcTensor]:
    """Yield the tensors of a LLaMA-3 file in order; query, key and value of a layer follow each other."""
    width, inner, kv_width = model.n_embd, model.intermediate_size, model.n_kv_head * model.head_width
    layers = [f"model.layers.{layer}" for layer in range(model.n_layer)]
    yield _plain("model.embed_tokens.weight", model.vocab_size, width)
    yield from (_plain(f"{layer}.input_layernorm.weight", width) for layer in layers)
    for layer in layers:
        yield LlmcTensor(f"{layer}.self_attn.q_proj.weight", (width, width), width, LlmcForm.interleaved, model.n_head)
        yield LlmcTensor(
            f"{layer}.self_attn.k_proj.weight", (kv_width, width), kv_width, LlmcForm.interleaved, model.n_kv_head
        )
        yield _plain(f"{layer}.self_attn.v_proj.weight", kv_width, width)
    yield from (_plain(f"{layer}.self_attn.o_proj.weight", width, width) for layer in layers)
    yield from (_plain(f"{layer}.post_attention_layernorm.weight", width) for layer in layers)
    yield from (_plain(f"{layer}.mlp.up_proj.weight", inner, width) for layer in layers)
    yield from (_plain(f"{layer}.mlp.gate_proj.weight", inner, width) for layer in layers)
    yield from (_plain(f"{layer}.mlp.down_proj.weight", width, inner) for layer in layers)
    yield _plain("model.norm.weight", width)
    yield _plain("lm_head.weight", model.vocab_size, width)


def _plain(name: str, *shape: int) -> LlmcTensor:
    return LlmcTensor(name, shape, shape[0])


def _gpt2_header(model: ModelConfig) -> tuple[list[int], list[str]]:
    """Return the header's members from the third on, and the settings without a place in a file."""
    problems = []
    if not model.tie_word_embeddings:
        problems.append("model.tie_word_embeddings=false: a file has one table for both")
    if model.intermediate_size != 4 * model.n_embd:
        problems.append(f"model.intermediate_size={model.intermediate_size}: a file has 4 times model.n_embd")
    if model.activation is not Activation.gelu_tanh:
        problems.append(f"model.activation={model.activation.value}: llm.c has gelu_tanh")
    if model.norm_eps != _NORM_EPS:
        problems.append(f"model.norm_eps={model.norm_eps}: llm.c has {_NORM_EPS}")
    padded = -(-model.vocab_size // _PAD) * _PAD
    sizes = [model.max_position_embeddings, model.vocab_size, model.n_layer, model.n_head, model.n_embd, padded]
    return sizes, problems


def _llama3_header(model: ModelConfig) -> tuple[list[int], list[str]]:
    """Return the header's members from the third on, and the settings without a place in a file.

    The width of the MLP is `multiple_of * ceil(int(multiplier * int(8 n_embd / 3)) / multiple_of)`; multiplier, epsilon
    and theta are the bits of float32 numbers: llm.c itself writes them as integers, which loses their values.
    """
    problems = []
    if model.rope_scaling not in (None, _SCALED):
        problems.append(f"model.rope_scaling={model.rope_scaling}: llm.c has {_SCALED}, or none")
    multiple = model.intermediate_size & -model.intermediate_size
    multiplier = (model.intermediate_size + 0.25) / (8 * model.n_embd // 3)
    is_scaled = model.rope_scaling is not None
    return [
        model.max_position_embeddings,
        model.vocab_size,
        model.n_layer,
        model.n_head,
        model.n_kv_head,
        model.n_embd,
        _bits(multiplier),
        multiple,
        _bits(model.norm_eps),
        _bits(model.rope_theta),
        int(is_scaled),
        4,  # max_gen_batch_size, of no meaning for weights
        3,
        int(is_scaled),
    ], problems


@dataclass(frozen=True, slots=True)
class LlmcFamily:
    """The files of a family.

    Args:
        magic: first number of a file.
        sizes: index in the header of each size, by name.
        read_model: the model of a valid header and the count of numbers after it; None if no model fits.
        write_header: the members from the third on, and the settings without a place in a file.
        parts: the tensors in order, given the rows of the padded vocabulary.
    """

    magic: int
    sizes: Mapping[str, int]
    read_model: Callable[[Sequence[int], int], ModelConfig | None]
    write_header: Callable[[ModelConfig], tuple[list[int], list[str]]]
    parts: Callable[[ModelConfig, int], Iterator[LlmcTensor]]

    def problems_of_header(self, header: Sequence[int]) -> list[str]:
        """Return the impossible sizes in a header."""
        problems = []
        for name, index in self.sizes.items():
            most = _MOST_LAYERS if name == "n_layer" else _MOST
            if not 1 <= header[index] <= most:
                problems.append(f"{name}={header[index]}: must be 1 to {most}")
        padded = self.sizes.get(_PADDED)
        if not problems and padded is not None and header[padded] < header[3]:
            problems.append(f"{_PADDED}={header[padded]}: below vocab_size={header[3]}")
        return problems


_PADDED = "padded_vocab_size"
FAMILIES: dict[Family, LlmcFamily] = {
    Family.gpt2: LlmcFamily(
        magic=20240326,
        sizes={"max_seq_len": 2, "vocab_size": 3, "n_layer": 4, "n_head": 5, "n_embd": 6, _PADDED: 7},
        read_model=_gpt2_model,
        write_header=_gpt2_header,
        parts=_gpt2_parts,
    ),
    Family.llama3: LlmcFamily(
        magic=20240803,
        sizes={"max_seq_len": 2, "vocab_size": 3, "n_layer": 4, "n_head": 5, "n_kv_head": 6, "n_embd": 7},
        read_model=_llama3_model,
        write_header=_llama3_header,
        parts=_llama3_parts,
    ),
}
MAGICS = {family.magic: family for family in FAMILIES.values()}
