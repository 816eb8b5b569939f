"""The validation loss over the first windows of the validation data, in order."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from models import token_loss
from trainer.checkpoint.live import reshard
from trainer.launch import Cluster
from trainer.state import TrainerState


@torch.no_grad()
def evaluate(state: TrainerState, micro_batches: Iterable[torch.Tensor], cluster: Cluster) -> float:
    """Return the mean loss of all ranks' micro batches, the same bits on every rank. A collective call.

    Args:
        micro_batches: this rank's int64 windows [batch, seq_length + 1] on the device; as many on every rank.
    """
    losses = [float(token_loss(state.model(windows[:, :-1]), windows[:, 1:])) for windows in micro_batches]
    reshard(state.model)
    rows = cluster.gather([sum(losses), float(len(losses))])
    return sum(row[0] for row in rows) / sum(row[1] for row in rows)
