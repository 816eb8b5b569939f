"""Sums over ranks in a fixed binary tree, by recursive halving.

Source: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH", section 3.3,
with the nearest ranks first. A rank sends as many bytes as in a ring's reduce-scatter, most of them to its neighbor.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def sum_scatter(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's chunk of the sum over ranks: ((0 + 1) + (2 + 3)) + ... A collective call.

    Args:
        flat: [ranks * n], whose chunk c of n elements goes to rank c; it is left as it is.
        group: of a power of two of ranks.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    chunks = flat.view(ranks, -1)  # those that this rank still adds, in order of the ranks that get them
    distance = 1
    while distance < ranks:
        pairs, bit = chunks.view(-1, 2, chunks.shape[1]), rank // distance % 2
        outgoing = pairs[:, 1 - bit].contiguous()
        incoming = torch.empty_like(outgoing)
        _exchange(outgoing, incoming, rank ^ distance, group)
        # The rank at the other end adds the same two numbers in the other order, which is the same sum.
        chunks = incoming.add_(pairs[:, bit])
        distance *= 2
    return chunks[0]


def sum_all(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum over ranks, in the same tree, on every rank. A collective call.

    Args:
        flat: [n]; its memory may be used for the sum.
    """
    ranks, missing = dist.get_world_size(group), -flat.numel() % dist.get_world_size(group)
    padded = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
    chunk = sum_scatter(padded, group)
    dist.all_gather(list(padded.view(ranks, -1).unbind()), chunk, group=group)
    return padded[: flat.numel()]


def _exchange(outgoing: torch.Tensor, incoming: torch.Tensor, peer: int, group: dist.ProcessGroup) -> None:
    """Exchange tensors with a rank of the group."""
    operations = [
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
