"""Tied embeddings with a copy on both ends of a pipeline: they must be the same bits when a state is saved."""

from __future__ import annotations

import torch
import torch.distributed as dist
import xxhash

import models
from trainer.checkpoint.live import local_of
from trainer.checkpoint.snapshot import memory_of
from trainer.errors import CheckpointError
from trainer.parallel.pipeline import tied_parameters
from trainer.state import TrainerState


def check_tied_copies(state: TrainerState, ends: dist.ProcessGroup | None) -> None:
    """Compare the digests of both copies, weights and moments. A collective call of the group `ends`; None is none.

    Raises:
        CheckpointError: on both stages, if the copies differ: what would be saved is not what trains.
    """
    if ends is None:
        return
    digest = xxhash.xxh3_64()
    for part in state.parts:
        for parameter in tied_parameters(part.model):
            digest.update(memory_of(local_of(parameter)))
            for key in ("exp_avg", "exp_avg_sq", "step"):
                digest.update(memory_of(local_of(part.optimizer.state[parameter][key])))
    own = digest.intdigest() >> 1
    device = next(state.parts[0].model.parameters()).device
    low, high = torch.tensor(own, device=device), torch.tensor(own, device=device)
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=ends)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=ends)
    if int(low) != int(high):
        raise CheckpointError(
            "The two copies of a tied parameter differ",
            where=f"{' and '.join(sum(models.aliases(state.config).items(), ()))}, rank {dist.get_rank()}",
            expected="the same bits on the first and the last pipeline stage",
            fix="Nothing was saved; resume from the last checkpoint.",
        )
