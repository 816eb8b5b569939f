"""GPT-2 in the way of nanoGPT, written for the benchmark: one compiled model with the loss inside.

Source: https://github.com/karpathy/nanoGPT, model.py: the same layers, dtypes and calls of torch.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from models.config import ModelConfig


class NanoGPT(nn.Module):
    """Returns the loss of tokens and targets, int64 [batch, sequence]. No dropout."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.n_embd
        self.tokens = nn.Embedding(config.padded_vocab_size, width)
        self.positions = nn.Embedding(config.max_position_embeddings, width)
        self.blocks = nn.ModuleList(_Block(width, config.n_head) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, config.padded_vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy, 0-d."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten(), ignore_index=-1)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.attention(self.norm_1(x)).chunk(3, dim=2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        down: torch.Tensor = self.feed_forward(self.norm_2(x))
        return x + down
