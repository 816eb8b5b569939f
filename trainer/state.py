"""The state of a run: model, optimizer and progress as one object, and the one enumeration of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from models import Model, ModelConfig, aliases, stored_tensors
from trainer.checkpoint.json_file import Json
from trainer.checkpoint.layout import Kind, TensorSpec
from trainer.checkpoint.live import Contents, LiveTensor, Stored, live_tensors
from trainer.errors import CheckpointError
from trainer.progress import Progress

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class TrainerState:
    """Everything that changes while training.

    Args:
        ranks: the global ranks on which this rank's plain tensors are replicated.
    """

    model: Model
    optimizer: torch.optim.Optimizer
    ranks: tuple[int, ...]
    progress: Progress = field(default_factory=Progress)

    def shards(self, *, with_optimizer: bool = True) -> Iterator[LiveTensor]:
        """Yield this rank's part of every tensor, by the name it has on disk. Saving reads them, loading fills them.

        Raises:
            CheckpointError: for a trainable parameter that the optimizer does not know.
        """
        config = self.model.config
        stored = {name: Stored(t.shape, t.view) for name, t in stored_tensors(config).items()}
        for alias, name in aliases(config).items():
            stored[alias] = stored[name]
        known = set(self.optimizer.state)
        optimizer = self.optimizer if with_optimizer else None
        yield from live_tensors(self.model, optimizer, ranks=self.ranks, stored=stored)
        unknown = [name for name, p in self.model.named_parameters() if p.requires_grad and p not in known]
        if unknown:
            raise CheckpointError(
                "The optimizer does not know a parameter", where=unknown[0], found=f"{len(unknown)} such"
            )

    def contents(self, documents: Mapping[str, Json], *, with_optimizer: bool) -> Contents:
        """Return what a checkpoint of this state holds."""
        config = self.model.config
        specs = tuple(checkpoint_specs(config, with_optimizer=with_optimizer))
        return Contents(specs, tuple(self.shards(with_optimizer=with_optimizer)), aliases(config), documents)


def checkpoint_specs(config: ModelConfig, *, with_optimizer: bool) -> Iterator[TensorSpec]:
    """Yield every tensor of a checkpoint in order, computed from the sizes of the model alone."""
    tensors = stored_tensors(config)
    for name, tensor in tensors.items():
        yield TensorSpec(Kind.MODEL, name, tensor.shape, torch.float32, tensor.view)
    if not with_optimizer:
        return
    for moment in _MOMENTS:
        for name, tensor in tensors.items():
            yield TensorSpec(Kind.OPTIMIZER, f"{moment}.{name}", tensor.shape, torch.float32, tensor.view)
    for name in tensors:
        yield TensorSpec(Kind.OPTIMIZER, f"step.{name}", (), torch.float32, ())
