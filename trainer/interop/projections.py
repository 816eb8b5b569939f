"""Orders the rows of query, key and value projections as other programs do. Pure.

Letters in shapes: A heads, G query groups, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from models.config import ModelConfig


def split_groups(fused: torch.Tensor, config: ModelConfig) -> list[torch.Tensor]:
    """Return the queries, keys and values from a fused projection.

    Megatron and torchtitan order its rows by query group. Each group has A / G query heads, a key head, and a value
    head.

    Args:
        fused: [(A + 2 G) D, ...].

    Returns:
        [A D, ...], [G D, ...], [G D, ...], with heads in the same order.
    """
    groups, head = config.n_kv_head, config.head_width
    queries = config.n_head // groups * head
    grouped = fused.reshape(groups, queries + 2 * head, *fused.shape[1:])
    parts = torch.split(grouped, [queries, head, head], dim=1)
    return [part.reshape(-1, *fused.shape[1:]) for part in parts]


def join_groups(parts: Sequence[torch.Tensor], config: ModelConfig) -> torch.Tensor:
    """Return the fused query, key and value projection. The inverse of `split_groups`."""
    groups = config.n_kv_head
    grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    joined = torch.cat(grouped, dim=1)
    return joined.reshape(-1, *joined.shape[2:])


def halves_from_pairs(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder each head's rows from pairs to halves, [heads * head_dim, width].

    torchtitan and llm.c rotate rows 2i and 2i + 1 in a head by the i-th angle. transformers and Reprise rotate rows i
    and i + head_dim / 2. Attention sums over a head, so the result is the same.
    """
    heads = tensor.shape[0] // head_dim
    pairs = tensor.view(heads, head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
