"""The GPT-2 network. Its names, shapes and plan are in `gpt2_spec`."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import Activation, ModelConfig, Stage
from models.layers import (
    Conv1D,
    Dropout,
    Embedding,
    LayerNorm,
    OutputLayer,
    Site,
    as_key,
    attention_mask,
    causal_attention,
    document_positions,
    run_block,
)
from models.network import Model


class GPT2(Model):
    """A GPT-2 language model, or a pipeline stage."""

    def __init__(self, config: ModelConfig, stage: Stage, compute_dtype: torch.dtype) -> None:
        super().__init__(config, stage, compute_dtype)
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

    def forward(self, x: Tensor, *, dropout_key: int | Tensor | None = None, starts: Tensor | None = None) -> Tensor:
        """Run this stage, see `Model`."""
        key, table = as_key(dropout_key), None
        mask = None if starts is None else attention_mask(starts)
        if self.stage.first:
            output = self.lm_head if self.stage.last else None
            tokens, table = cast(Embedding, self.transformer["wte"]).look_up(x, output)
            positions = self.transformer["wpe"](x.shape[1], starts)
            # Cast before the sum, as where a wrapper has cast the tables themselves.
            x = self.dropout(tokens.to(self.compute_dtype) + positions.to(self.compute_dtype), key)
        for block in self.blocks.values():
            x = run_block(block, x, mask, key, recompute=self.activation_checkpointing)
        if self.stage.last:
            x = self.lm_head(self.transformer["ln_f"](x), table=table)
        return x


class Positions(nn.Module):
    """Learned position vectors, `weight` [max_position_embeddings, width]."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, length: int, starts: Tensor | None) -> Tensor:
        """Return vectors for the first `length` positions, [length, width], or for document positions, [B, T, width].

        Args:
            starts: see `Model`.
        """
        return self.weight[:length] if starts is None else F.embedding(document_positions(starts), self.weight)


class GPT2Block(nn.Module):
    """A layer: attention and MLP, each behind its norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, config.norm_eps)
        self.attn = GPT2Attention(config, layer)
        self.ln_2 = LayerNorm(config.n_embd, config.norm_eps)
        self.mlp = GPT2MLP(config, layer)

    def forward(self, x: Tensor, mask: Tensor | None, key: int | None) -> Tensor:
        """Map hidden states [B, T, n_embd] to the same shape; `mask` as for `causal_attention`."""
        x = x + self.attn(self.ln_1(x), mask, key)
        return x + cast(Tensor, self.mlp(self.ln_2(x), key))


class GPT2Attention(nn.Module):
    """Causal multi-head attention; the heads are counted in the weights, which tensor parallelism may have cut."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.head_dim = config.head_width
        self.c_attn = Conv1D(config.n_embd, 3, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)
        self.attn_dropout = Dropout(config.dropout, Site.attention, layer=layer)
        self.resid_dropout = Dropout(config.dropout, Site.attention_residual, layer=layer)

    def forward(self, x: Tensor, mask: Tensor | None, key: int | None) -> Tensor:
        """Map [B, T, n_embd] to the same shape; `mask` as for `causal_attention`."""
        q, k, v = self.c_attn(x).unflatten(-1, (-1, self.head_dim)).unbind(2)
        dropout_p = self.attn_dropout.seed(key, x.device)
        attended = self.c_proj(causal_attention(q, k, v, mask, dropout_p))
        return cast(Tensor, self.resid_dropout(attended, key))


class GPT2MLP(nn.Module):
    """Two projections with a GELU between, in the configured form."""

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
