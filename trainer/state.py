"""The state of a run (model, optimizer and progress) and the enumeration of its tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from models.config import ModelConfig
from models.families import aliases, stored_tensors
from models.network import Model
from trainer.checkpoint.format.json_file import Document
from trainer.checkpoint.format.layout import TensorKind, TensorSpec, build_layout
from trainer.checkpoint.tensors.file_aligned import zeros_like_files
from trainer.checkpoint.tensors.live import (
    Contents,
    Grid,
    LiveTensor,
    Marks,
    Stored,
    is_dtensor,
    live_tensors,
    local_of,
    memory_marks,
    parameter_names,
)
from trainer.config.schema import OptimizerName, OptimizerSection
from trainer.errors import CheckpointError
from trainer.optim import build_optimizer
from trainer.optimizers import state_tensors
from trainer.progress import Progress


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One stage of the model and its optimizer; a rank has one part, or one per virtual stage."""

    model: Model
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class _Enumerated:
    """The tensors of a state, valid while `marks` equals the state's `memory_marks`."""

    marks: tuple[Marks, ...]
    specs: tuple[TensorSpec, ...]
    live: tuple[LiveTensor, ...]


@dataclass(slots=True)
class TrainerState:
    """All state that training changes.

    Args:
        grid: the ranks that hold the same stages as this rank.
        frozen: the stored names of the parameters that stay unchanged.
    """

    config: ModelConfig
    parts: Sequence[ModelPart]
    grid: Grid
    progress: Progress = field(default_factory=Progress)
    optimizer: OptimizerName = OptimizerName.adamw
    frozen: frozenset[str] = frozenset()
    _enumerated: dict[bool, _Enumerated] = field(default_factory=dict, repr=False)

    def shards(self, *, with_optimizer: bool = True) -> Iterator[LiveTensor]:
        """Yield this rank's part of every tensor, under its name on disk. Saving reads the parts, loading fills them.

        Raises:
            CheckpointError: for a trainable parameter without optimizer state.
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
            for group in part.optimizer.param_groups:
                yield from group["params"]

    def contents(self, documents: Mapping[str, Document], *, with_optimizer: bool) -> Contents:
        """Return the contents of a checkpoint. `specs` and `live` are the same objects until a tensor moves."""
        optimizers = tuple(part.optimizer for part in self.parts)
        marks = tuple(memory_marks(part.model, part.optimizer) for part in self.parts)
        known = self._enumerated.get(with_optimizer)
        if known is None or known.marks != marks:
            specs = tuple(checkpoint_specs(self.config, self.optimizer if with_optimizer else None, self.frozen))
            known = _Enumerated(marks, specs, tuple(self.shards(with_optimizer=with_optimizer)))
            self._enumerated[with_optimizer] = known
        constant = tuple(p for part in self.parts for p in part.model.parameters() if not p.requires_grad)
        return Contents(known.specs, known.live, aliases(self.config), documents, optimizers, constant)


def build_part(
    config: ModelConfig,
    model: Model,
    section: OptimizerSection,
    *,
    grid: Grid,
    file_bytes: int,
    frozen: Collection[str] = (),
    is_invariant: bool = False,
) -> ModelPart:
    """Return a stage and its optimizer, in memory laid out so that saving needs no copy. Values are kept.

    Args:
        grid: the ranks that hold the stage.
        file_bytes: the size at which a file of a checkpoint is full.
        frozen: the stored names of the parameters that stay unchanged.
        is_invariant: see `optim.build_optimizer`.
    """
    layout = build_layout(tuple(checkpoint_specs(config, section.name, frozen)), file_bytes=file_bytes)
    stored = {name: Stored(t.shape, t.view) for name, t in stored_tensors(config).items()}
    parameters = {name: parameter for parameter, name in parameter_names(model).items()}
    live = [t for t in live_tensors(model, None, grid=grid, stored=stored) if t.spec.name in parameters]
    pairs = [(tensor, local_of(parameters[tensor.spec.name])) for tensor in live]
    plain = [(tensor, local) for tensor, local in pairs if not is_dtensor(parameters[tensor.spec.name])]
    for name, memory in zeros_like_files(plain, ("",), layout).items():
        parameters[name].data = memory.copy_(parameters[name].data)
    keys = dict.fromkeys(tensor.key for tensor in state_tensors(section.name, config, frozen) if tensor.stored.shape)
    zeros = zeros_like_files(pairs, [f"{key}." for key in keys], layout)
    return ModelPart(model, build_optimizer(config, model, section, zeros, is_invariant=is_invariant))


def _under_stored_name(tensor: LiveTensor, names: Mapping[str, str]) -> LiveTensor:
    """Return the tensor itself or, for the last stage's copy of a tied one, a copy under the stored name."""
    for alias, name in names.items():
        prefix, found, rest = tensor.spec.name.partition(alias)
        if found and not rest:
            return replace(tensor, spec=replace(tensor.spec, name=prefix + name), is_copy=True)
    return tensor


def _refuse_unknown(part: ModelPart) -> None:
    known = set(part.optimizer.state)
    unknown = [name for name, p in part.model.named_parameters() if p.requires_grad and p not in known]
    if unknown:
        raise CheckpointError(
            "The optimizer has no state for a parameter", where=unknown[0], found=f"{len(unknown)} such"
        )


def checkpoint_specs(
    config: ModelConfig, optimizer: OptimizerName | None, frozen: Collection[str] = ()
) -> Iterator[TensorSpec]:
    """Yield every tensor of a checkpoint in order, computed from the sizes of the model alone.

    Args:
        optimizer: the one whose state is saved; None for weights alone.
        frozen: the stored names of the parameters that it does not change.
    """
    for name, tensor in stored_tensors(config).items():
        yield TensorSpec(TensorKind.MODEL, name, tensor.shape, torch.float32, tensor.view)
    for kept in () if optimizer is None else state_tensors(optimizer, config, frozen):
        yield TensorSpec(TensorKind.OPTIMIZER, kept.name, kept.stored.shape, torch.float32, kept.stored.view)
