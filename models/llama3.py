"""The LLaMA-3 and Qwen3 network. Names, shapes and plans are in `llama3_spec` and `qwen3_spec`."""

from math import pi
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig, RopeScaling, Stage
from models.families import spec_of
from models.layers import (
    Embedding,
    Linear,
    OutputLayer,
    RMSNorm,
    as_key,
    attention_mask,
    causal_attention,
    document_positions,
    run_block,
)
from models.network import Model


class Llama3(Model):
    """A LLaMA-3 or Qwen3 language model, or a pipeline stage."""

    def __init__(self, config: ModelConfig, stage: Stage, compute_dtype: torch.dtype) -> None:
        super().__init__(config, stage, compute_dtype)
        self._rotation: tuple[Tensor, Tensor] | None = None
        rows = config.padded_vocab_size
        parts: dict[str, nn.Module] = {}
        if stage.first:
            parts["embed_tokens"] = Embedding(rows, config.n_embd)
        parts["layers"] = nn.ModuleDict({str(layer): Llama3Block(config) for layer in stage.layers})
        if stage.last:
            parts["norm"] = RMSNorm(config.n_embd, config.norm_eps)
        self.model = nn.ModuleDict(parts)
        if stage.last:
            self.lm_head = OutputLayer(config.n_embd, rows, config.vocab_size)
        self.tie_weights()

    def forward(self, x: Tensor, *, dropout_key: int | Tensor | None = None, starts: Tensor | None = None) -> Tensor:
        """Run this stage, see `Model`; only adapters have dropout."""
        (cos, sin), table, mask = self._rotation_for(x), None, None
        if starts is not None:
            positions, mask = document_positions(starts), attention_mask(starts)
            cos, sin = cos[positions], sin[positions]
        key = as_key(dropout_key) if self.config.lora.dropout else None
        if self.stage.first:
            output = self.lm_head if self.stage.last else None
            x, table = cast(Embedding, self.model["embed_tokens"]).look_up(x, output)
            x = x.to(self.compute_dtype)
        for block in self.blocks.values():
            x = run_block(block, x, cos, sin, mask, key, recompute=self.activation_checkpointing)
        if self.stage.last:
            x = self.lm_head(self.model["norm"](x), table=table)
        return x

    def _rotation_for(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # Neither parameter nor buffer: a model materialized from meta has nothing here that would need filling in.
        cached = self._rotation
        length = x.shape[1] * (1 if self.stage.first else self.sequence_shards)
        if cached is None or cached[0].device != x.device or cached[0].shape[0] != length:
            cached = self._rotation = rotation(self.config, length, device=x.device, dtype=self.compute_dtype)
        return cached


class Llama3Attention(nn.Module):
    """Causal grouped-query attention; the heads are counted in the weights, which tensor parallelism may have cut.

    Qwen3 normalizes every query and key head before the rotation. Query heads share a norm weight, key heads another.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_width
        q_width, kv_width = config.n_head * config.head_width, config.n_kv_head * config.head_width
        self.q_proj = Linear(config.n_embd, q_width)
        self.k_proj = Linear(config.n_embd, kv_width)
        self.v_proj = Linear(config.n_embd, kv_width)
        self.o_proj = Linear(q_width, config.n_embd)
        has_norms = "self_attn.q_norm.weight" in spec_of(config).block(config)
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_width, config.norm_eps) if has_norms else nn.Identity() for _ in range(2)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Map [B, T, n_embd] to the same shape; `mask` as for `causal_attention`."""
        heads = (-1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, heads)), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).unflatten(-1, heads)), cos, sin)
        v = self.v_proj(x).unflatten(-1, heads)
        return cast(Tensor, self.o_proj(causal_attention(q, k, v, mask)))


class Llama3MLP(nn.Module):
    """A projection gated by another's SiLU, and a projection back.

    Source: Shazeer 2020, "GLU Variants Improve Transformer" (SwiGLU).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.n_embd, config.intermediate_size)
        self.up_proj = Linear(config.n_embd, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, n_embd] to the same shape."""
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Llama3Block(nn.Module):
    """A layer: attention and MLP, each behind its norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Llama3Attention(config)
        self.mlp = Llama3MLP(config)
        self.input_layernorm = RMSNorm(config.n_embd, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.n_embd, config.norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, key: int | None = None
    ) -> Tensor:
        """Map hidden states [B, T, n_embd] to the same shape.

        `cos` and `sin` are as `rotation` returns them, or [B, T, 1, head_dim] for positions in documents; `mask` is as
        for `causal_attention`. `key` seeds the adapters' dropout.
        """
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + cast(Tensor, self.mlp(self.post_attention_layernorm(x)))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) in `x` [B, T, heads, head_dim] by their positions' angles.

    Source: Su et al. 2021, "RoFormer", paired as in transformers' `rotate_half`, with its signs moved into `sin`.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rotation(config: ModelConfig, length: int, *, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return each angle's cosine and signed sine at positions 0 to `length`, each [length, 1, head_dim].

    The sines' first half is negated, see `rotate`. Computed in float32 on the CPU: every device rotates by the
    same angles.
    """
    # A table first made during inference must still serve a later backward pass.
    with torch.inference_mode(False), torch.no_grad():
        positions = torch.arange(length, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, inverse_frequencies(config)).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        tables = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return tables[0].to(device, dtype), tables[1].to(device, dtype)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Return the angle per position for each pair in a head, float32 [head_dim / 2] on the CPU, in radians."""
    exponents = torch.arange(0, config.head_width, 2, dtype=torch.float32, device="cpu") / config.head_width
    frequencies = 1.0 / config.rope_theta**exponents
    return frequencies if config.rope_scaling is None else scale_frequencies(frequencies, config.rope_scaling)


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide low frequencies by the factor, keep high frequencies, and blend between.

    Source: `apply_scaling` in LLaMA 3.1's reference code, transformers' `_compute_llama3_parameters`.
    """
    turns = scaling.original_max_position_embeddings / (2 * pi / frequencies)
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    high_share = share.clamp(0.0, 1.0)
    return (1 - high_share) * frequencies / scaling.factor + high_share * frequencies
