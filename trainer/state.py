"""The state of a run: model, optimizer and progress as one object, and the one enumeration of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from models import Model, ModelConfig, aliases, stored_tensors
from trainer.checkpoint.json_file import Json
from trainer.checkpoint.layout import Kind, TensorSpec
from trainer.checkpoint.live import Contents, Grid, LiveTensor, Stored, live_tensors
from trainer.errors import CheckpointError
from trainer.progress import Progress

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Part:
    """One stage of the model with the optimizer of its parameters; a rank has one, or one per virtual stage."""

    model: Model
    optimizer: torch.optim.Optimizer


@dataclass(slots=True)
class TrainerState:
    """Everything that changes while training.

    Args:
        grid: the ranks that hold the same stages as this one.
    """

    config: ModelConfig
    parts: Sequence[Part]
    grid: Grid
    progress: Progress = field(default_factory=Progress)

    def shards(self, *, with_optimizer: bool = True) -> Iterator[LiveTensor]:
        """Yield this rank's part of every tensor, by the name it has on disk. Saving reads them, loading fills them.

        Raises:
            CheckpointError: for a trainable parameter that the optimizer does not know.
        """
        stored = {name: Stored(t.shape, t.view) for name, t in stored_tensors(self.config).items()}
        names = aliases(self.config)
        stored |= {alias: stored[name] for alias, name in names.items()}
        for part in self.parts:
            for tensor in live_tensors(
                part.model, part.optimizer if with_optimizer else None, grid=self.grid, stored=stored
            ):
                yield _under_stored_name(tensor, names)
            _refuse_unknown(part)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this rank's trainable parameters."""
        for part in self.parts:
            yield from (parameter for parameter in part.model.parameters() if parameter.requires_grad)

    def contents(self, documents: Mapping[str, Json], *, with_optimizer: bool) -> Contents:
        """Return what a checkpoint of this state holds."""
        specs = tuple(checkpoint_specs(self.config, with_optimizer=with_optimizer))
        live = tuple(self.shards(with_optimizer=with_optimizer))
        return Contents(specs, live, aliases(self.config), documents)


def _under_stored_name(tensor: LiveTensor, names: Mapping[str, str]) -> LiveTensor:
    """Return a tied tensor that lives under its second name, on another stage than the first, as a copy of that."""
    for alias, name in names.items():
        prefix, found, rest = tensor.spec.name.partition(alias)
        if found and not rest:
            return replace(tensor, spec=replace(tensor.spec, name=prefix + name), is_copy=True)
    return tensor


def _refuse_unknown(part: Part) -> None:
    known = set(part.optimizer.state)
    unknown = [name for name, p in part.model.named_parameters() if p.requires_grad and p not in known]
    if unknown:
        raise CheckpointError("The optimizer does not know a parameter", where=unknown[0], found=f"{len(unknown)} such")


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
