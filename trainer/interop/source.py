"""A state read tensor by tensor, from another program's files or our checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from models.config import ModelConfig
from reprise.errors import CheckpointError, MismatchError
from reprise.format import ADAPTERS, whole
from reprise.loading import Checkpoint, fill, read_places
from reprise.storage import Json
from reprise.tensors import LiveTensor, torch_dtype
from trainer.data.tokenizer_beside import TOKENIZER_FILES
from trainer.optim.table import AVERAGE
from trainer.record.run_record import saved_model

MOMENTS, STEP = ("exp_avg", "exp_avg_sq"), "step"


@dataclass(frozen=True, slots=True)
class StateSource:
    """A state to convert.

    Args:
        iteration: Completed optimizer steps. 0 for weights alone.
        read: Returns a CPU tensor with the stored shape and any floating-point dtype. Its argument is a stored name, as
            in transformers (`families.stored_tensors`). Moments are `exp_avg.<name>` and `exp_avg_sq.<name>`, steps
            `step.<name>`. Called once per tensor, in our file order.
        tokenizer: The tokenizer files beside the model, by name.
        consumed_samples: The other program's count of consumed samples, if available.
        settings: Values by dotted key to continue the run as the other program would. The command's overrides win.
        log: The other program's log records, for `metrics.jsonl`.
        base: The identity of the weights beneath adapters. None for a whole model.
    """

    model: ModelConfig
    iteration: int
    has_optimizer: bool
    read: Callable[[str], torch.Tensor]
    tokenizer: Mapping[str, Path] = field(default_factory=dict)
    consumed_samples: int | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    log: Sequence[Json] = ()
    base: Json | None = None


def by_kind(
    weight: Callable[[str], torch.Tensor],
    moment: Callable[[str, str], torch.Tensor],
    step: Callable[[str], Any],
) -> Callable[[str], torch.Tensor]:
    """Return a source's `read`.

    Args:
        weight: Returns a parameter by its stored name.
        moment: Returns a moment by its kind and its parameter's name.
        step: Returns a parameter's step count.
    """

    def read(name: str) -> torch.Tensor:
        kind, _, parameter = name.partition(".")
        if kind == STEP:
            return torch.tensor(float(step(parameter)))
        return moment(kind, parameter) if kind in MOMENTS else weight(name)

    return read


def refuse_adapters(checkpoint: Checkpoint, *, fix: str) -> None:
    """Refuse a checkpoint with adapters and no base weights.

    Raises:
        MismatchError: It has adapters alone. The error says what to do.
    """
    if holds_adapters(checkpoint):
        raise MismatchError("A checkpoint holds adapters without their base weights", where=checkpoint.path, fix=fix)


def holds_adapters(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has adapters and no base weights."""
    return ADAPTERS in checkpoint.manifest.files


def tensor_reader(checkpoint: Checkpoint) -> Callable[[str], torch.Tensor]:
    """Return a function mapping a stored name to a CPU tensor with the stored shape, verified block by block.

    Raises:
        CheckpointError: A header is damaged.
    """
    places = read_places(checkpoint)

    def read(name: str) -> torch.Tensor:
        if name not in places:
            raise CheckpointError("The checkpoint is missing a tensor", where=checkpoint.path, expected=name)
        spec = places[name].spec
        memory = torch.empty(spec.view, dtype=torch_dtype(spec.dtype))
        fill(checkpoint, [LiveTensor(spec, whole(spec.view), memory, (0,))])
        return memory.reshape(spec.shape)

    return read


def has_averages(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has moving averages."""
    return any(name.startswith(f"{AVERAGE}.") for name in read_places(checkpoint))


def require_averages(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint without moving averages.

    Raises:
        MismatchError: There are none. The error says what to do.
    """
    if not has_averages(checkpoint):
        raise MismatchError(
            "A checkpoint has no moving averages",
            where=checkpoint.path,
            fix="Omit --ema: train.ema_decay was 0, or it is a weights-only checkpoint.",
        )


def of_checkpoint(checkpoint: Checkpoint, *, averages: bool = False, takes_adapters: bool = False) -> StateSource:
    """Return our checkpoint as a source. Every block read is verified against its digest.

    Args:
        averages: Whether to read moving averages in place of parameters. Frozen parameters have none.
        takes_adapters: Whether the checkpoint may hold adapters alone.

    Raises:
        CheckpointError: The state file or a header is damaged.
        MismatchError: The checkpoint holds adapters alone, or lacks the requested averages.
    """
    if not takes_adapters:
        refuse_adapters(
            checkpoint,
            fix="Merge the two with `reprise convert export hf --merge BASE CHECKPOINT OUT`; `reprise generate` takes "
            "--base BASE.",
        )
    if averages:
        require_averages(checkpoint)
    read_stored = tensor_reader(checkpoint)

    def read(name: str) -> torch.Tensor:
        average = f"{AVERAGE}.{name}"
        return read_stored(average if averages and average in read_places(checkpoint) else name)

    model = saved_model(checkpoint.state, where=checkpoint.path)
    paths = {name: checkpoint.accessory(name) for name in TOKENIZER_FILES}
    tokenizer = {name: path for name, path in paths.items() if path is not None}
    return StateSource(model, checkpoint.iteration, checkpoint.has_optimizer, read, tokenizer)
