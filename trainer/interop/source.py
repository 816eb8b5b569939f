"""A state read tensor by tensor, from another program's files or from our checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from models.config import ModelConfig
from reprise.errors import CheckpointError, MismatchError
from reprise.format import ADAPTERS, whole
from reprise.loading import Checkpoint, fill, find_accessory, read_places
from reprise.storage import Json
from reprise.tensors import LiveTensor, torch_dtype
from trainer.data.tokenizer_beside import TOKENIZER_FILES
from trainer.optim.table import AVERAGE
from trainer.record.run_record import saved_model


@dataclass(frozen=True, slots=True)
class StateSource:
    """A state to convert.

    Args:
        iteration: optimizer steps done; 0 for weights alone.
        read: returns a CPU tensor of the stored shape, of any floating-point dtype, by its stored name, which is
            transformers' (`families.stored_tensors`); moments are `exp_avg.<name>` and `exp_avg_sq.<name>`, steps
            `step.<name>`. Called once per tensor, in the order of our files.
        tokenizer: the tokenizer files beside the model, by name.
        consumed_samples: samples trained on, where the other program counted them.
        settings: the overrides that continue the run as the other program would, ahead of the command's.
        log: the records of its log for `metrics.jsonl`.
    """

    model: ModelConfig
    iteration: int
    has_optimizer: bool
    read: Callable[[str], torch.Tensor]
    tokenizer: Mapping[str, Path] = field(default_factory=dict)
    consumed_samples: int | None = None
    settings: Sequence[str] = ()
    log: Sequence[Json] = ()


def refuse_adapters(checkpoint: Checkpoint, *, fix: str) -> None:
    """Refuse a checkpoint with adapters and no weights beneath them.

    Raises:
        MismatchError: with what to do.
    """
    if holds_adapters(checkpoint):
        raise MismatchError(
            "A checkpoint holds adapters alone, and not the weights beneath them", where=checkpoint.path, fix=fix
        )


def holds_adapters(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has adapters and no weights beneath them."""
    return ADAPTERS in checkpoint.manifest.files


def of_checkpoint(checkpoint: Checkpoint, *, averages: bool = False) -> StateSource:
    """Return a checkpoint of ours as a source; every block read is verified against its digest.

    Args:
        averages: see `adapters_of`.

    Raises:
        CheckpointError: if its state file or a header is damaged.
        MismatchError: if it holds adapters alone, or no averages to read.
    """
    refuse_adapters(
        checkpoint,
        fix="Merge the two with `reprise convert export hf --merge BASE CHECKPOINT OUT`; `reprise generate` takes "
        "--base BASE.",
    )
    return adapters_of(checkpoint, averages=averages)


def tensor_reader(checkpoint: Checkpoint) -> Callable[[str], torch.Tensor]:
    """Return a function from a stored name to a CPU tensor of the stored shape, verified block by block.

    Raises:
        CheckpointError: if a header is damaged.
    """
    places = read_places(checkpoint)

    def read(name: str) -> torch.Tensor:
        if name not in places:
            raise CheckpointError("A checkpoint lacks a tensor", where=checkpoint.path, expected=name)
        spec = places[name].spec
        memory = torch.empty(spec.view, dtype=torch_dtype(spec.dtype))
        fill(checkpoint, places, [LiveTensor(spec, whole(spec.view), memory, (0,))], threads=1)
        return memory.reshape(spec.shape)

    return read


def has_averages(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has moving averages of its parameters."""
    return any(name.startswith(f"{AVERAGE}.") for name in checkpoint.manifest.tensors)


def require_averages(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint without moving averages of its parameters.

    Raises:
        MismatchError: with what to do.
    """
    if not has_averages(checkpoint):
        raise MismatchError(
            "A checkpoint has no moving averages",
            where=checkpoint.path,
            fix="Leave --ema out: train.ema_decay was 0, or the weights were saved alone.",
        )


def adapters_of(checkpoint: Checkpoint, *, averages: bool = False) -> StateSource:
    """Return a checkpoint of ours, which may hold adapters alone, as a source.

    Args:
        averages: read the moving averages of the parameters in their place; a frozen one has none.

    Raises:
        CheckpointError: if its state file or a header is damaged.
        MismatchError: if it has no averages to read.
    """
    if averages:
        require_averages(checkpoint)
    read_stored = tensor_reader(checkpoint)

    def read(name: str) -> torch.Tensor:
        average = f"{AVERAGE}.{name}"
        return read_stored(average if averages and average in checkpoint.manifest.tensors else name)

    model = saved_model(checkpoint.state, where=checkpoint.path)
    paths = {name: find_accessory(checkpoint, name) for name in TOKENIZER_FILES}
    tokenizer = {name: path for name, path in paths.items() if path is not None}
    return StateSource(model, checkpoint.iteration, checkpoint.has_optimizer, read, tokenizer)
