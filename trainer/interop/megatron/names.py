"""Megatron-Core's tensors and ours: names, fused projections, orientation, padded vocabulary. Pure.

A mapping applies to a weight and to its moments alike. Every tensor here is that of the whole model, joined over the
ranks of tensor and pipeline parallelism. Sources: `megatron/core/models/gpt/gpt_model.py`, `transformer/attention.py`
(`SelfAttention.get_query_key_value_tensors`) and `transformer/mlp.py` of megatron-core 0.16.

Letters in shapes: H hidden size, F width of the MLP, A heads, G query groups, D width of a head, V tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from models.config import Family, ModelConfig
from models.families import spec_of, stored_tensors
from models.spec import OUTPUT
from trainer.interop.query_groups import join_groups, split_groups

Shape = tuple[int, ...]
LAYERS = "decoder.layers"


@dataclass(frozen=True, slots=True)
class MegatronTensor:
    """A tensor of a `GPTModel`, or one layer of it.

    Args:
        name: within the model; of a tensor of a layer, within the layer.
        layer: the number of the layer in the whole model, from 0; None outside the layers.
        shape: of the full tensor of one layer, with padded vocabulary rows.
        cut: the dimension along which tensor parallelism cuts it; None if every rank holds all of it.
        is_gated: whether it is gate above up, of which each rank holds its part of both: ranks' tensors, one after the
            other, are gate 0, up 0, gate 1, up 1.
    """

    name: str
    layer: int | None
    shape: Shape
    cut: int | None = None
    is_gated: bool = False

    @property
    def stacked(self) -> str:
        """Return the name in a file where the layers are dimension 0 of one tensor."""
        return self.name if self.layer is None else f"{LAYERS}.{self.name}"

    @property
    def numbered(self) -> str:
        """Return the name in a file where each layer has tensors of its own."""
        return self.name if self.layer is None else f"{LAYERS}.{self.layer}.{self.name}"


@dataclass(frozen=True, slots=True)
class Correspondence:
    """A tensor of Megatron's and those of ours that it holds.

    Args:
        names: our stored names, several where projections are fused.
        split: returns ours, in the order of `names`, from Megatron's; may be views of it.
        join: returns Megatron's from ours, without padded vocabulary rows.
    """

    tensor: MegatronTensor
    names: tuple[str, ...]
    split: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    join: Callable[[Sequence[torch.Tensor]], torch.Tensor]

    def take(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return our tensor `name` from Megatron's."""
        return self.split(tensor)[self.names.index(name)]


def correspondences(config: ModelConfig, padded_vocab_size: int | None = None) -> list[Correspondence]:
    """Return every tensor of a model in the order of `GPTModel.sharded_state_dict`; each of our tensors is in one.

    Args:
        padded_vocab_size: rows of Megatron's embedding and output layer; those beyond `config.vocab_size` are dropped
            by `split`. By default there are none.
    """
    rows = config.vocab_size if padded_vocab_size is None else padded_vocab_size
    spec, width = spec_of(config), config.n_embd
    found = [_table(MegatronTensor("embedding.word_embeddings.weight", None, (rows, width), 0), spec.embedding, config)]
    if not spec.is_rotary:
        positions = MegatronTensor(
            "embedding.position_embeddings.weight", None, (config.max_position_embeddings, width)
        )
        found.append(_same(positions, "transformer.wpe.weight"))
    block = _gpt2_block if config.family is Family.gpt2 else _llama_block
    for layer in range(config.n_layer):
        found += block(config, layer, f"{spec.blocks}.{layer}.")
    final = "transformer.ln_f" if config.family is Family.gpt2 else "model.norm"
    kinds = ("weight", "bias") if config.family is Family.gpt2 else ("weight",)
    found += [_same(MegatronTensor(f"decoder.final_layernorm.{k}", None, (width,)), f"{final}.{k}") for k in kinds]
    if not config.tie_word_embeddings:
        found.append(_table(MegatronTensor("output_layer.weight", None, (rows, width), 0), OUTPUT, config))
    assert {name for one in found for name in one.names} == set(stored_tensors(config))
    return found


def by_our_name(found: Sequence[Correspondence]) -> Mapping[str, Correspondence]:
    """Return the correspondence that holds each of our tensors, by our name."""
    return {name: one for one in found for name in one.names}


def is_norm(tensor: MegatronTensor) -> bool:
    """Return whether a tensor is the weight of a norm, which Megatron may store minus 1 (`apply_layernorm_1p`)."""
    return tensor.name.endswith(("layer_norm_weight", "layernorm.weight"))


def _gpt2_block(config: ModelConfig, layer: int, prefix: str) -> list[Correspondence]:
    width, inner = config.n_embd, config.intermediate_size
    return [
        *_norms(layer, "self_attention.linear_qkv", f"{prefix}ln_1", width, ("weight", "bias")),
        _turned(MegatronTensor("self_attention.linear_proj.weight", layer, (width, width), 1), prefix + "attn.c_proj"),
        _same(MegatronTensor("self_attention.linear_proj.bias", layer, (width,)), prefix + "attn.c_proj.bias"),
        _fused(config, layer, "weight", prefix + "attn.c_attn.weight"),
        _fused(config, layer, "bias", prefix + "attn.c_attn.bias"),
        *_norms(layer, "mlp.linear_fc1", f"{prefix}ln_2", width, ("weight", "bias")),
        _turned(MegatronTensor("mlp.linear_fc1.weight", layer, (inner, width), 0), prefix + "mlp.c_fc"),
        _same(MegatronTensor("mlp.linear_fc1.bias", layer, (inner,), 0), prefix + "mlp.c_fc.bias"),
        _turned(MegatronTensor("mlp.linear_fc2.weight", layer, (width, inner), 1), prefix + "mlp.c_proj"),
        _same(MegatronTensor("mlp.linear_fc2.bias", layer, (width,)), prefix + "mlp.c_proj.bias"),
    ]


def _llama_block(config: ModelConfig, layer: int, prefix: str) -> list[Correspondence]:
    width, inner, head = config.n_embd, config.intermediate_size, config.head_width
    ours = tuple(f"{prefix}self_attn.{letter}_proj.weight" for letter in "qkv")
    fused = MegatronTensor("self_attention.linear_qkv.weight", layer, (_fused_rows(config), width), 0)
    heads = [
        _same(MegatronTensor(f"self_attention.{letter}_layernorm.weight", layer, (head,)), f"{prefix}{theirs}")
        for letter, theirs in (("q", "self_attn.q_norm.weight"), ("k", "self_attn.k_norm.weight"))
    ]
    gated = MegatronTensor("mlp.linear_fc1.weight", layer, (2 * inner, width), 0, is_gated=True)
    return [
        *_norms(layer, "self_attention.linear_qkv", f"{prefix}input_layernorm", width, ("weight",)),
        _same(
            MegatronTensor("self_attention.linear_proj.weight", layer, (width, config.n_head * head), 1),
            prefix + "self_attn.o_proj.weight",
        ),
        Correspondence(fused, ours, lambda t: split_groups(t, config), lambda parts: join_groups(parts, config)),
        *(heads if config.family is Family.qwen3 else ()),
        *_norms(layer, "mlp.linear_fc1", f"{prefix}post_attention_layernorm", width, ("weight",)),
        Correspondence(
            gated,
            (f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight"),
            lambda tensor: (tensor[:inner], tensor[inner:]),
            lambda parts: torch.cat(list(parts)),
        ),
        _same(MegatronTensor("mlp.linear_fc2.weight", layer, (width, inner), 1), prefix + "mlp.down_proj.weight"),
    ]


def _norms(layer: int, linear: str, ours: str, width: int, kinds: Sequence[str]) -> list[Correspondence]:
    """Return the norm in front of a linear layer, under the name that it has when the two are fused.

    `GPTModel` of the local spec, whose norms are modules of their own, saves the same names.
    """
    return [_same(MegatronTensor(f"{linear}.layer_norm_{k}", layer, (width,)), f"{ours}.{k}") for k in kinds]


def _same(tensor: MegatronTensor, name: str) -> Correspondence:
    return Correspondence(tensor, (name,), lambda theirs: (theirs,), lambda ours: ours[0])


def _turned(tensor: MegatronTensor, module: str) -> Correspondence:
    """Return a weight of GPT-2, which transformers stores as [in, out]."""
    return Correspondence(tensor, (f"{module}.weight",), lambda theirs: (theirs.T,), lambda ours: ours[0].T)


def _table(tensor: MegatronTensor, name: str, config: ModelConfig) -> Correspondence:
    return Correspondence(tensor, (name,), lambda theirs: (theirs[: config.vocab_size],), lambda ours: ours[0])


def _fused(config: ModelConfig, layer: int, kind: str, name: str) -> Correspondence:
    """Return `c_attn` of GPT-2: all queries, all keys, all values, along the last dimension."""
    rows = _fused_rows(config)
    shape: Shape = (rows, config.n_embd) if kind == "weight" else (rows,)

    def split(fused: torch.Tensor) -> Sequence[torch.Tensor]:
        # GPT-2 has a group for each head. The three are turned in one copy, so that two are in memory.
        heads = fused.reshape(config.n_head, 3, config.head_width, *fused.shape[1:])
        joined = heads.transpose(0, 1).reshape(fused.shape)
        return (joined.T if joined.dim() == 2 else joined,)

    def join(ours: Sequence[torch.Tensor]) -> torch.Tensor:
        rows_first = ours[0].T if ours[0].dim() == 2 else ours[0]
        return join_groups(rows_first.chunk(3), config)

    return Correspondence(MegatronTensor(f"self_attention.linear_qkv.{kind}", layer, shape, 0), (name,), split, join)


def _fused_rows(config: ModelConfig) -> int:
    return (config.n_head + 2 * config.n_kv_head) * config.head_width
