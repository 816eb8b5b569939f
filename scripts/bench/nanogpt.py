"""GPT-2 in the way of nanoGPT, written for the benchmark: one compiled model with the loss inside, and fused AdamW.

Source: https://github.com/karpathy/nanoGPT, model.py and train.py: the same layers, dtypes and calls of torch.
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
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-1)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.norm_1(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).contiguous().view(batch, length, width))
        down: torch.Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + down


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return nanoGPT's optimizer: fused, with decay of matrices and tables alone."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
