"""Sums over ranks in a fixed binary tree, by recursive halving.

Source: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH", section 3.3,
but with the nearest ranks first. A rank sends as many bytes as in a ring reduce-scatter, most of them to its neighbor.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def sum_scatter(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's chunk of the sum over ranks: ((0 + 1) + (2 + 3)) + ... A collective call.

    Args:
        flat: [ranks * n]. Rank c gets chunk c, with n elements. The tensor is not changed.
        group: A process group whose size is a power of two.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    chunks = flat.view(ranks, -1)  # the chunks this rank still adds, ordered by destination rank
    distance = 1
    while distance < ranks:
        pairs, bit = chunks.view(-1, 2, chunks.shape[1]), rank // distance % 2
        outgoing = pairs[:, 1 - bit].contiguous()
        incoming = torch.empty_like(outgoing)
        _exchange(outgoing, incoming, rank ^ distance, group)
        # The peer adds the same two numbers in the other order, with the same sum.
        chunks = incoming.add_(pairs[:, bit])
        distance *= 2
    return chunks[0]


def sum_all(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum over ranks, added in the same tree, on every rank. A collective call.

    Args:
        flat: [n]. Its memory may be reused for the sum.
    """
    ranks, missing = dist.get_world_size(group), -flat.numel() % dist.get_world_size(group)
    padded = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
    chunk = sum_scatter(padded, group)
    dist.all_gather(list(padded.view(ranks, -1).unbind()), chunk, group=group)
    return padded[: flat.numel()]


def _exchange(outgoing: torch.Tensor, incoming: torch.Tensor, peer: int, group: dist.ProcessGroup) -> None:
    """Exchange tensors with another rank in the group."""
    operations = [
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
