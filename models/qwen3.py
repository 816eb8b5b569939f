"""The Qwen3 network: LLaMA-3's, with every query and key head normalized before the rotation."""

from typing import cast

from torch import Tensor, nn

from models.config import ModelConfig
from models.layers import RMSNorm, causal_attention
from models.llama3 import Llama3, Llama3Attention, Llama3Block, rotate


class Qwen3(Llama3):
    """A Qwen3 language model, or a pipeline stage."""

    @staticmethod
    def build_block(config: ModelConfig) -> nn.Module:
        """Return one layer."""
        return Qwen3Block(config)


class Qwen3Attention(Llama3Attention):
    """Causal grouped-query attention over normalized heads; query heads share a norm weight, and key heads another."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.q_norm = RMSNorm(config.head_width, config.norm_eps)
        self.k_norm = RMSNorm(config.head_width, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Map [B, T, n_embd] to the same shape; `mask` as for `causal_attention`."""
        heads = (-1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, heads)), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).unflatten(-1, heads)), cos, sin)
        v = self.v_proj(x).unflatten(-1, heads)
        return cast(Tensor, self.o_proj(causal_attention(q, k, v, mask)))


class Qwen3Block(Llama3Block):
    """A layer: attention and MLP, each behind its norm and added to the residual stream."""

    attention_class = Qwen3Attention
