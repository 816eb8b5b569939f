"""Writes a state as Megatron-LM's format `torch` lays it out over ranks, without Megatron.

Sources: `generate_state_dict` and `get_checkpoint_name` of `megatron/training/checkpointing.py`;
`_compute_per_buffer_param_layout` and `get_parameter_state_dp_zero` of `megatron/core/optimizer/distrib_optimizer.py`;
`state_dict_for_save_checkpoint` of `megatron/model/language_model.py`. A tensor of the whole model comes from
`names.py`, which the tests of `torch_dist` compare with files of Megatron-Core itself.
"""

from __future__ import annotations

import argparse
import enum
import io
import itertools
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.config import Activation, Family, ModelConfig
from trainer.interop.megatron.names import Correspondence, correspondences
from trainer.interop.source import StateSource

KEYS = ("param", "exp_avg", "exp_avg_sq")
# The order in which a layer's modules hold their parameters, by their names in Megatron-Core, and their names.
_NORMS = ("self_attention.linear_qkv.layer_norm", "mlp.linear_fc1.layer_norm")
_ATTENTION, _MLP = ("self_attention.linear_proj", "self_attention.linear_qkv"), ("mlp.linear_fc1", "mlp.linear_fc2")
_HEADS = ("self_attention.q_layernorm", "self_attention.k_layernorm")  # of Qwen3
ORDERS = {
    "local": (_NORMS[0], *_ATTENTION, *_HEADS, _NORMS[1], *_MLP),
    "te": (_ATTENTION[0], _NORMS[0], _ATTENTION[1], *_HEADS, _NORMS[1], *_MLP),
    "newer": (_NORMS[0], *reversed(_ATTENTION), _NORMS[1], *_MLP),
}
NAMES = {
    "local": dict(zip((f"{norm}_" for norm in _NORMS), ("input_layernorm.", "pre_mlp_layernorm."), strict=True)),
    "te": {},
    "newer": {
        f"{_NORMS[0]}_": "input_norm.",
        f"{_NORMS[1]}_": "post_attention_norm.",
        "self_attention.linear_qkv.": "self_attention.query_key_value.",
        "self_attention.linear_proj.": "self_attention.dense.",
        "linear_fc1.": "dense_h_to_4h.",
        "linear_fc2.": "dense_4h_to_h.",
        "final_layernorm.": "final_norm.",
    },
}
Wholes = Mapping[str, tuple[Correspondence, dict[str, Tensor]]]
Chunk = Mapping[str, Mapping[str, Tensor]]


class Backend(enum.Enum):
    """A class that is not admitted, as `args` have some."""

    auto = 5


@dataclass(frozen=True)
class Way:
    """How Megatron was set to train.

    Args:
        names: `local` and `te` are Megatron-Core's two specs, `newer` Megatron-LM's own model.
        is_distributed: whether the optimizer's state is in flat buckets.
        bucket: elements after which a bucket ends.
        form: how the state is stored: `coalesced` buckets since April 2024, before a `list` with padding (`older`:
            under other keys).
        alignment: elements to a multiple of which a parameter begins.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    names: str = "local"
    version: float = 3.0
    is_distributed: bool = True
    dtype: torch.dtype = torch.float32
    bucket: int = 1 << 30
    form: str = "coalesced"
    alignment: int = 64
    rows: int = 0


def write(folder: Path, source: StateSource, way: Way, **others: Any) -> Path:
    """Write `folder/iter_<iteration>` and the file that names it; return the former."""
    path = folder / f"iter_{source.iteration:07d}"
    wholes = _wholes(source, way)
    for tp in range(way.tp):
        for pp in range(way.pp):
            rank = path / (f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if way.pp > 1 else ""))
            rank.mkdir(parents=True)
            chunks = [_chunk(wholes, source.model, way, tp, pp, vpp) for vpp in range(way.vpp)]
            saved = {
                "args": _args(source, way, others),
                "checkpoint_version": way.version,
                "iteration": source.iteration,
            }
            for number, chunk in enumerate(chunks):
                model = {name: values["param"].to(way.dtype) for name, values in chunk.items()}
                saved["model" if way.vpp == 1 else f"model{number}"] = _named(
                    model, way, is_tied=source.model.tie_word_embeddings
                )
            saved["optimizer"] = _groups(source) if way.is_distributed else _plain(chunks, source, way)
            saved["opt_param_scheduler"] = {"max_lr": 0.1, "num_steps": 12}
            saved["rng_state"] = [{"np_rng_state": np.random.get_state(), "rng_tracker_states": {}}]
            torch.save(saved, rank / "model_optim_rng.pt")
            if way.is_distributed:
                torch.save(_buffers(chunks, source.model, way, pp), rank / "distrib_optim.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(source.iteration))
    return path


def _args(source: StateSource, way: Way, others: Mapping[str, Any]) -> argparse.Namespace:
    model, is_gpt2 = source.model, source.model.family is Family.gpt2
    return argparse.Namespace(
        **{
            "num_layers": model.n_layer,
            "hidden_size": model.n_embd,
            "ffn_hidden_size": model.intermediate_size,
            "num_attention_heads": model.n_head,
            "num_query_groups": model.n_kv_head,
            "group_query_attention": model.n_kv_head != model.n_head,
            "max_position_embeddings": model.max_position_embeddings,
            "vocab_size": model.vocab_size,
            "padded_vocab_size": way.rows or model.vocab_size,
            "norm_epsilon": model.norm_eps,
            "init_method_std": model.initializer_range,
            "position_embedding_type": "learned_absolute" if is_gpt2 else "rope",
            "normalization": "LayerNorm" if is_gpt2 else "RMSNorm",
            "swiglu": not is_gpt2,
            "add_bias_linear": is_gpt2,
            "bias_gelu_fusion": model.activation is Activation.gelu_tanh,
            "rotary_base": int(model.rope_theta),
            "use_rope_scaling": False,
            "untie_embeddings_and_output_weights": not model.tie_word_embeddings,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "tensor_model_parallel_size": way.tp,
            "pipeline_model_parallel_size": way.pp,
            "seq_length": 16,
            "consumed_train_samples": 12 * source.iteration,
            "attention_backend": Backend.auto,
            "params_dtype": way.dtype,
            **others,
        }
    )


def _wholes(source: StateSource, way: Way) -> dict[str, tuple[Correspondence, dict[str, Tensor]]]:
    """Return Megatron's tensors of the whole model by numbered names, each with its moments."""
    generator, found = torch.Generator().manual_seed(7), {}
    for one in correspondences(source.model, way.rows or None):
        values = {}
        for key in KEYS:
            ours = [source.read(name if key == "param" else f"{key}.{name}") for name in one.names]
            tensor = one.join(ours)
            missing = one.tensor.shape[0] - tensor.shape[0]
            if missing:  # padding of the vocabulary takes part in training
                tensor = torch.cat([tensor, torch.rand(missing, tensor.shape[1], generator=generator)])
            values[key] = tensor.contiguous()
        found[one.tensor.numbered] = (one, values)
    if source.model.tie_word_embeddings and way.pp > 1:
        one, values = found["embedding.word_embeddings.weight"]
        found["output_layer.weight"] = (one, values)
    return found


def _chunk(
    wholes: Mapping[str, tuple[Correspondence, dict[str, Tensor]]],
    model: ModelConfig,
    way: Way,
    tp: int,
    pp: int,
    vpp: int,
) -> dict[str, dict[str, Tensor]]:
    """Return the parts of a rank's chunk in the order of its modules, under its own numbers of layers."""
    count = model.n_layer // way.pp // way.vpp
    first = vpp * (model.n_layer // way.vpp) + pp * count
    names = list(wholes)
    mine = [name for name in names if name.startswith("embedding.") and (pp, vpp) == (0, 0)]
    for layer in range(first, first + count):
        prefix = f"decoder.layers.{layer}."
        for module in ORDERS[way.names]:
            mine += [n for n in names if n.startswith(prefix) and _module(n.removeprefix(prefix)) == module]
    if (pp, vpp) == (way.pp - 1, way.vpp - 1):
        mine += [name for name in names if name.startswith(("decoder.final_layernorm", "output_layer"))]
    found = {}
    for name in mine:
        one, values = wholes[name]
        parts = name.split(".")
        if name.startswith("decoder.layers."):
            parts[2] = str(int(parts[2]) - first)
        cut = one.tensor.cut
        found[".".join(parts)] = {
            key: _part(value, cut, one.tensor.is_gated, way.tp, tp).contiguous() for key, value in values.items()
        }
    return found


def _module(name: str) -> str:
    """Return the part of a name that says which module it is of: `linear_qkv` and its fused norm are two."""
    return name.rsplit("_" if "layer_norm_" in name else ".", 1)[0]


def _part(tensor: Tensor, cut: int | None, is_gated: bool, tp: int, rank: int) -> Tensor:
    if cut is None:
        return tensor
    if is_gated:
        return torch.cat([half.chunk(tp)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(tp, dim=cut)[rank]


def _named(chunk: Mapping[str, Tensor], way: Way, *, is_tied: bool) -> dict[str, Any]:
    """Return a chunk as the model's own dictionary."""
    if way.names in ("local", "te"):
        found = OrderedDict[str, Any]()
        for name, tensor in chunk.items():
            found[_replaced(name, way)] = tensor
            if name.endswith("linear_proj.weight"):
                found[name.replace("weight", "_extra_state")] = io.BytesIO(b"fp8")
        return found
    language: dict[str, Any] = {}
    top: dict[str, Any] = {"language_model": language}
    for name, tensor in chunk.items():
        if name.startswith("embedding."):
            _, table, kind = name.split(".")
            language.setdefault("embedding", {})[table] = OrderedDict({kind: tensor})
        elif name.startswith("decoder."):
            language.setdefault("encoder", OrderedDict())[_replaced(name.removeprefix("decoder."), way)] = tensor
        elif is_tied:
            top["word_embeddings_for_head"] = OrderedDict(weight=tensor)
        else:
            language["output_layer"] = OrderedDict(weight=tensor)
    return top


def _replaced(name: str, way: Way) -> str:
    for old, new in NAMES[way.names].items():
        if old in name:
            return name.replace(old, new)
    return name


def _order(chunks: Sequence[Chunk]) -> list[list[Mapping[str, Tensor]]]:
    """Return the parameters of each group of the optimizer: with decay, without."""
    every = [(name, values) for chunk in chunks for name, values in chunk.items()]
    decays = [v for n, v in every if v["param"].dim() > 1 and not n.endswith(".bias")]
    return [decays, [v for n, v in every if v["param"].dim() == 1 or n.endswith(".bias")]]


def _plain(chunks: Sequence[Chunk], source: StateSource, way: Way) -> dict[str, Any]:
    groups, state, tables = _order(chunks), {}, []
    step = float(source.iteration)
    for group, decay in zip(groups, (1.0, 0.0), strict=True):
        numbers = list(range(len(state), len(state) + len(group)))
        tables.append({"wd_mult": decay, "lr": 0.1, "params": numbers})
        for number, values in zip(numbers, group, strict=True):
            state[number] = {"step": torch.tensor(step), **{key: values[key] for key in KEYS[1:]}}
    found: dict[str, Any] = {"state": state, "param_groups": tables}
    if way.dtype is torch.float32:
        return found
    return {"optimizer": found, "fp32_from_fp16_params": [[values["param"] for values in group] for group in groups]}


def _groups(source: StateSource) -> dict[str, Any]:
    step = float(source.iteration)
    return {"optimizer": {"param_groups": [{"wd_mult": wd, "lr": 0.1, "step": step} for wd in (1.0, 0.0)]}}


def _buffers(chunks: Sequence[Chunk], model: ModelConfig, way: Way, pp: int) -> dict[Any, Any]:
    """Return `distrib_optim.pt`: for each chunk a buffer of buckets, gathered from the data-parallel ranks."""
    saved: dict[Any, Any] = {"buckets_coalesced": True} if way.form == "coalesced" else {"per_bucket_numel": []}
    for number, chunk in enumerate(chunks):
        buffers: dict[str, Any] = {}
        for key in KEYS:
            padded, unpadded, _ = _buckets(chunk, key, model, way)
            gathered = [torch.cat(bucket.chunk(way.dp)) for bucket in padded]  # the shards of dp ranks
            if way.form == "coalesced":
                buffers[key] = torch.cat([b[:size] for b, size in zip(gathered, unpadded, strict=True)])
                buffers["numel_unpadded"] = sum(unpadded)
            else:
                buffers[key] = gathered
        name = torch.float32 if way.form == "older" else (way.dtype, torch.float32)
        saved[number] = {name: buffers}
    return saved


def _buckets(chunk: Chunk, key: str, model: ModelConfig, way: Way) -> tuple[list[Tensor], list[int], list[list[int]]]:
    """Return a chunk's buckets with padding, their numbers of elements without, and where parameters and gaps end."""
    padded, unpadded, ends = [], [], []
    parts, size = list[Tensor](), 0

    def finish() -> None:
        nonlocal parts, size
        end = -size % math.lcm(way.dp, 128)
        padded.append(torch.cat([*parts, torch.zeros(end)]))
        unpadded.append(size)
        ends.append(list(itertools.accumulate(part.numel() for part in parts)))
        parts, size = [], 0

    for name, values in reversed(chunk.items()):
        is_shared = model.tie_word_embeddings and way.pp > 1 and values["param"].dim() == 2 and "word_emb" in name
        is_shared |= model.tie_word_embeddings and name == "output_layer.weight"
        gap = -size % way.alignment
        parts.append(torch.zeros(gap))
        size += gap
        if is_shared and size:
            finish()
        parts.append(values[key].reshape(-1))
        size += values[key].numel()
        if size >= way.bucket or is_shared:
            finish()
    if size:
        finish()
    return padded, unpadded, ends


def drift_ranks(monkeypatch: pytest.MonkeyPatch, layout: ModuleType) -> None:
    """Make a layout's second rank of tensor parallelism hold other biases, in all their kinds."""
    lay_out = layout._chunk

    def drifted(*args: Any) -> Any:
        return {
            name: {key: value + (args[3] == 1 and name.endswith("linear_proj.bias")) for key, value in values.items()}
            for name, values in lay_out(*args).items()
        }

    monkeypatch.setattr(layout, "_chunk", drifted)
