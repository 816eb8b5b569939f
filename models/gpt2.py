"""GPT-2, under transformers' names and orientation.

Sources: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; `GPT2LMHeadModel` of transformers.
What both families share lives in `layers`.
"""

from math import sqrt
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import Activation, Initial, InitialKind, ModelConfig, Stage, StoredTensor
from models.layers import (
    Conv1D,
    Dropout,
    Embedding,
    FusedConv1D,
    LayerNorm,
    OutputLayer,
    Site,
    as_key,
    causal_attention,
    run_block,
    tie,
)

_OUTPUT = "lm_head.weight"
_EMBEDDING = "transformer.wte.weight"
# transformers' names, see its `activations.py`.
HF_ACTIVATIONS = {Activation.gelu_tanh: "gelu_new", Activation.gelu: "gelu"}


class GPT2(nn.Module):
    """A GPT-2 language model, or the stage of one."""

    def __init__(self, config: ModelConfig, stage: Stage, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.stage = stage
        self.compute_dtype = compute_dtype
        self.activation_checkpointing = False
        width, rows = config.n_embd, config.padded_vocab_size
        parts: dict[str, nn.Module] = {}
        if stage.first:
            parts["wte"] = Embedding(rows, width)
            parts["wpe"] = Positions(config.max_position_embeddings, width)
            self.dropout = Dropout(config.dropout, Site.embedding, layer=0)
        parts["h"] = nn.ModuleDict({str(layer): GPT2Block(config, layer) for layer in stage.layers})
        if stage.last:
            parts["ln_f"] = LayerNorm(width, config.norm_eps)
        self.transformer = nn.ModuleDict(parts)
        if stage.last:
            self.lm_head = OutputLayer(width, rows, config.vocab_size)
        self.tie_weights()

    @property
    def blocks(self) -> nn.ModuleDict:
        """Return the blocks of this stage by global layer number."""
        return cast(nn.ModuleDict, self.transformer["h"])

    def tie_weights(self) -> None:
        """Make the output weight the embedding Parameter itself, where both are here and tied.

        Materialising or wrapping a model separates the two: call again after each.
        """
        if self.config.tie_word_embeddings and self.stage.first and self.stage.last:
            tie(cast(Embedding, self.transformer["wte"]), self.lm_head)

    def forward(self, x: Tensor, *, dropout_key: int | Tensor | None = None) -> Tensor:
        """Run this stage.

        `x` is int64 tokens [B, T] on the first stage, else hidden states [B, T, n_embd]. Returns logits
        [B, T, padded_vocab_size] on the last stage, else hidden states, in the compute dtype. Without a `dropout_key`
        nothing is dropped.
        """
        key, table = as_key(dropout_key), None
        if self.stage.first:
            output = self.lm_head if self.stage.last else None
            tokens, table = cast(Embedding, self.transformer["wte"]).look_up(x, output)
            positions = self.transformer["wpe"](x.shape[1])
            # Cast before the sum, as where a wrapper has cast the tables themselves.
            x = self.dropout(tokens.to(self.compute_dtype) + positions.to(self.compute_dtype), key)
        for block in self.blocks.values():
            x = run_block(block, x, key, recompute=self.activation_checkpointing)
        if self.stage.last:
            x = self.lm_head(self.transformer["ln_f"](x), table)
        return x


class Positions(nn.Module):
    """Learned vectors of the positions, `weight` [max_position_embeddings, width]."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, length: int) -> Tensor:
        """Return the vectors of the first `length` positions, [length, width]."""
        return self.weight[:length]


class GPT2Block(nn.Module):
    """One layer: attention and GPT2MLP, each behind its norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, config.norm_eps)
        self.attn = GPT2Attention(config, layer)
        self.ln_2 = LayerNorm(config.n_embd, config.norm_eps)
        self.mlp = GPT2MLP(config, layer)

    def forward(self, x: Tensor, key: int | None) -> Tensor:
        """Map hidden states [B, T, n_embd] to the same shape."""
        x = x + self.attn(self.ln_1(x), key)
        return x + cast(Tensor, self.mlp(self.ln_2(x), key))


class GPT2Attention(nn.Module):
    """Causal multi-head attention; the heads are counted in the weights, which tensor parallelism may have cut."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.c_attn = FusedConv1D(config.n_embd, 3, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)
        self.attn_dropout = Dropout(config.dropout, Site.attention, layer=layer)
        self.resid_dropout = Dropout(config.dropout, Site.attention_residual, layer=layer)

    def forward(self, x: Tensor, key: int | None) -> Tensor:
        """Map [B, T, n_embd] to the same shape."""
        q, k, v = self.c_attn(x).unflatten(-1, (-1, self.head_dim)).unbind(2)
        dropout_p = self.attn_dropout.seed(key, x.device)
        attended = self.c_proj(causal_attention(q, k, v, dropout_p))
        return cast(Tensor, self.resid_dropout(attended, key))


class GPT2MLP(nn.Module):
    """Two projections with a GELU between, in the form that the configuration names."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.n_embd, config.intermediate_size)
        self.c_proj = Conv1D(config.intermediate_size, config.n_embd)
        self.approximate = "tanh" if config.activation is Activation.gelu_tanh else "none"
        self.dropout = Dropout(config.dropout, Site.mlp_residual, layer=layer)

    def forward(self, x: Tensor, key: int | None) -> Tensor:
        """Map [B, T, n_embd] to the same shape."""
        hidden = F.gelu(self.c_fc(x), approximate=self.approximate)
        return cast(Tensor, self.dropout(self.c_proj(hidden), key))


def stored_tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    """Return the tensors of the whole model as they lie on disk, in model order."""
    vocabulary = (config.vocab_size, config.n_embd)
    positions = (config.max_position_embeddings, config.n_embd)
    stored = {_EMBEDDING: _plain(*vocabulary), "transformer.wpe.weight": _plain(*positions)}
    for layer in range(config.n_layer):
        stored |= {f"transformer.h.{layer}.{name}": tensor for name, tensor in _block_tensors(config).items()}
    stored |= {"transformer.ln_f.weight": _plain(config.n_embd), "transformer.ln_f.bias": _plain(config.n_embd)}
    return stored if config.tie_word_embeddings else stored | {_OUTPUT: _plain(*vocabulary)}


def _block_tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    width, inner = config.n_embd, config.intermediate_size
    return {
        "ln_1.weight": _plain(width),
        "ln_1.bias": _plain(width),
        "attn.c_attn.weight": StoredTensor(shape=(width, 3 * width), view=(width, 3, width)),
        "attn.c_attn.bias": StoredTensor(shape=(3 * width,), view=(3, width)),
        "attn.c_proj.weight": _plain(width, width),
        "attn.c_proj.bias": _plain(width),
        "ln_2.weight": _plain(width),
        "ln_2.bias": _plain(width),
        "mlp.c_fc.weight": _plain(width, inner),
        "mlp.c_fc.bias": _plain(inner),
        "mlp.c_proj.weight": _plain(inner, width),
        "mlp.c_proj.bias": _plain(width),
    }


def _plain(*shape: int) -> StoredTensor:
    return StoredTensor(shape=shape, view=shape)


def aliases(config: ModelConfig) -> dict[str, str]:
    """Return the names that mean another stored tensor, and that tensor's name."""
    return {_OUTPUT: _EMBEDDING} if config.tie_word_embeddings else {}


def initial_values(config: ModelConfig) -> dict[str, Initial]:
    """Return the initial values of every stored tensor.

    Projections into the residual stream get std / sqrt(2 * n_layer), one for each addition to it: section 2.3 of the
    GPT-2 paper, `GPT2PreTrainedModel._init_weights` of transformers.
    """
    return {name: _initial(name, config) for name in stored_tensors(config)}


def _initial(name: str, config: ModelConfig) -> Initial:
    if name.endswith(".bias"):
        return Initial(InitialKind.zeros)
    if name.split(".")[-2].startswith("ln_"):
        return Initial(InitialKind.ones)
    if name.endswith("c_proj.weight"):
        return Initial(InitialKind.normal, config.initializer_range / sqrt(2 * config.n_layer))
    return Initial(InitialKind.normal, config.initializer_range)


def looked_up_parameters(config: ModelConfig) -> int:
    """Return how many parameters are only looked up: no token is multiplied with them."""
    rows = config.max_position_embeddings + (0 if config.tie_word_embeddings else config.vocab_size)
    return rows * config.n_embd


def hf_config(config: ModelConfig) -> dict[str, object]:
    """Return transformers' `config.json` of this model."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "dtype": "float32",
        "activation_function": HF_ACTIVATIONS[config.activation],
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "n_inner": config.intermediate_size,
        "n_positions": config.max_position_embeddings,
        "n_ctx": config.max_position_embeddings,  # llama.cpp's converter reads no other name
        "vocab_size": config.vocab_size,
        "attn_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "layer_norm_epsilon": config.norm_eps,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
    }
