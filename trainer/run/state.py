"""A run's state (model, optimizer and progress), and the enumeration of its tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from models.adapters import PREFIX, adapter_tensors, saved_tensors, stored_name
from models.config import ModelConfig
from models.families import aliases, stored_tensors
from models.network import Model
from reprise.format import StoredDtype, TensorKind, TensorSpec, build_layout
from reprise.tensors import (
    Contents,
    Grid,
    LiveTensor,
    Marks,
    Stored,
    is_dtensor,
    live_tensors,
    local_of,
    memory_marks,
    zeros_like_files,
)
from trainer.config.optimizer import OptimizerSection
from trainer.config.schema import Config
from trainer.optim.adamw import stored_names
from trainer.optim.average import keep_average
from trainer.optim.build import build_optimizer
from trainer.optim.table import state_tensors
from trainer.schedules.progress import Progress

# torch aligns CPU memory to this many bytes (c10, `core/alignment.h`).
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A model stage and its optimizer. A rank has a part per virtual stage."""

    model: Model
    optimizer: torch.optim.Optimizer


@dataclass(slots=True)
class TrainerState:
    """All state changed by training.

    Args:
        grid: The ranks with the same stages as this rank.
        specs: Every tensor of its checkpoints with optimizer state, in order.
        averages: Whether each parameter has a moving average.
        other_end: How many ranks further the other copy of a tied embedding is, on the first or last pipeline rank. 0
            without another copy.
    """

    config: ModelConfig
    parts: Sequence[ModelPart]
    grid: Grid
    specs: tuple[TensorSpec, ...]
    progress: Progress = field(default_factory=Progress)
    averages: bool = False
    other_end: int = 0
    # By whether they have the optimizer state. Valid while the state has these `memory_marks`.
    _contents: dict[bool, tuple[tuple[Marks, ...], Contents]] = field(default_factory=dict, repr=False)

    def shards(self, *, with_optimizer: bool = True) -> Iterator[LiveTensor]:
        """Yield this rank's part of every checkpoint tensor, under its name on disk.

        A save reads the parts, and a load fills them. The base beneath adapters is not among them.
        """
        return (tensor for tensor in self._live(with_optimizer=with_optimizer) if not self._is_base(tensor))

    def base_shards(self) -> Iterator[LiveTensor]:
        """Yield this rank's part of every tensor beneath adapters. The run's checkpoints do not hold them."""
        return filter(self._is_base, self._live(with_optimizer=False))

    def _is_base(self, tensor: LiveTensor) -> bool:
        return self.config.is_adapted and tensor.spec.kind is TensorKind.MODEL

    def _live(self, *, with_optimizer: bool) -> Iterator[LiveTensor]:
        names, stored = aliases(self.config), _stored_forms(self.config)
        stored |= {alias: stored[name] for alias, name in names.items()}
        for part in self.parts:
            optimizer = part.optimizer if with_optimizer else None
            for found in live_tensors(part.model, optimizer, grid=self.grid, stored=stored):
                tensor = _under_stored_name(found, names)
                if self.other_end and tensor.spec.name.endswith(tuple(names.values())):
                    others = (rank + self.other_end for rank in tensor.replicas)
                    tensor = replace(tensor, replicas=tuple(sorted((*tensor.replicas, *others))))
                yield tensor

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this rank's trainable parameters."""
        for part in self.parts:
            for group in part.optimizer.param_groups:
                yield from group["params"]

    def contents(self, *, with_optimizer: bool) -> Contents:
        """Return a checkpoint's contents without documents. They stay the same objects until a tensor moves."""
        marks = tuple(memory_marks(part.model, part.optimizer) for part in self.parts)
        old_marks, contents = self._contents.get(with_optimizer, ((), None))
        if contents is None or old_marks != marks:
            contents = Contents(
                tuple(spec for spec in self.specs if with_optimizer or spec.kind is not TensorKind.OPTIMIZER),
                tuple(self.shards(with_optimizer=with_optimizer)),
                {} if self.config.is_adapted else aliases(self.config),
                optimizers=tuple(part.optimizer for part in self.parts),
                constant=tuple(p for part in self.parts for p in part.model.parameters() if not p.requires_grad),
            )
            self._contents[with_optimizer] = marks, contents
        return contents


def build_part(config: Config, model: Model, grid: Grid, specs: Sequence[TensorSpec]) -> ModelPart:
    """Return a stage and its optimizer, in memory laid out for saving without copies. Values are kept.

    Args:
        grid: The ranks with the stage.
        specs: See `TrainerState`.
    """
    layout = build_layout(specs, file_bytes=config.checkpoint.file_bytes)
    parameters = {name: parameter for parameter, name in stored_names(model).items()}
    tensors = live_tensors(model, None, grid=grid, stored=_stored_forms(config.model))
    shards = (_under_stored_name(tensor, {}) for tensor in tensors)
    live = [tensor for tensor in shards if tensor.spec.name in parameters]
    pairs = [(tensor, local_of(parameters[tensor.spec.name])) for tensor in live]
    plain = [(tensor, local) for tensor, local in pairs if not is_dtensor(parameters[tensor.spec.name])]
    # Sums in matrix products depend on the alignment. Tensors gathered by FSDP2 have torch's, and so do these.
    for name, memory in zeros_like_files(plain, ("",), layout, alignment=_ALIGNMENT).items():
        parameters[name].data = memory.copy_(parameters[name].data)
    state = (spec for spec in specs if spec.kind is TensorKind.OPTIMIZER and spec.shape)
    keys = dict.fromkeys(spec.name.partition(".")[0] for spec in state)
    zeros = zeros_like_files(pairs, [f"{key}." for key in keys], layout)
    is_invariant = config.parallel.invariant_ranks > 0
    optimizer = build_optimizer(config.model, model, config.optimizer, zeros, is_invariant=is_invariant)
    if config.train.ema_decay > 0:
        keep_average(optimizer, model, config.train.ema_decay, zeros)
    return ModelPart(model, optimizer)


def _stored_forms(config: ModelConfig) -> dict[str, Stored]:
    """Return the network's parameters as they lie on disk, by their names in the network."""
    tensors = {**stored_tensors(config), **adapter_tensors(config)}
    return {name.removeprefix(PREFIX): Stored(tensor.shape, tensor.view) for name, tensor in tensors.items()}


def _under_stored_name(tensor: LiveTensor, names: Mapping[str, str]) -> LiveTensor:
    """Return the tensor under its name on disk.

    Args:
        names: Tied tensors' second names (alias -> stored name).
    """
    spec = tensor.spec
    is_state = spec.kind is TensorKind.OPTIMIZER
    key, dot, parameter = spec.name.partition(".") if is_state else ("", "", spec.name)
    name = names.get(parameter, stored_name(parameter))
    if name == parameter:
        return tensor
    kind = spec.kind if is_state or parameter in names else TensorKind.ADAPTER
    return replace(tensor, spec=replace(spec, name=f"{key}{dot}{name}", kind=kind))


def checkpoint_specs(
    config: ModelConfig, optimizer: OptimizerSection | None, frozen: Collection[str] = (), *, averages: bool = False
) -> Iterator[TensorSpec]:
    """Yield every checkpoint tensor in order, computed only from the model's sizes.

    Args:
        optimizer: The optimizer whose state is saved. None for weights only.
        frozen: Stored names of the frozen parameters.
        averages: Whether each parameter has a moving average, beside the optimizer state.
    """
    kind = TensorKind.ADAPTER if config.is_adapted else TensorKind.MODEL
    for name, tensor in saved_tensors(config).items():
        yield TensorSpec(kind, name, tensor.shape, StoredDtype.F32, tensor.view)
    for tensor_state in () if optimizer is None else state_tensors(optimizer, config, frozen, averages=averages):
        stored = tensor_state.stored
        yield TensorSpec(TensorKind.OPTIMIZER, tensor_state.name, stored.shape, tensor_state.dtype, stored.view)
