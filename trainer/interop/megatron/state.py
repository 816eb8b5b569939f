"""Represents a Megatron run's state with its ranks joined, and converts it to our names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash

from models.families import stored_tensors
from reprise.errors import CheckpointError
from reprise.storage import shown
from trainer.interop.finite import require_finite
from trainer.interop.formats import log_settings
from trainer.interop.megatron.arguments import DescribedModel
from trainer.interop.megatron.names import MegatronTensor, by_our_name, is_norm
from trainer.interop.source import StateSource

_log = logging.getLogger(__name__)

WEIGHTS, MASTERS, MOMENTS = "weights", "masters", ("exp_avg", "exp_avg_sq")
RELEASE = "release"  # the folder of a released model, which has no run to continue
_STEP = "step"
_SCHEDULE = ("lr_decay_style", "max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps")


Readers = Mapping[str, Callable[[MegatronTensor], torch.Tensor]]


@dataclass(frozen=True, slots=True)
class MegatronState:
    """A Megatron run's tensors, each joined over the ranks.

    Args:
        readers: By kind, a function returning a tensor: `WEIGHTS`, in the model's dtype; `MASTERS`, if the optimizer
            has weight copies; and `MOMENTS`, if there is optimizer state.
        step: The optimizer's step count, shared by all parameters.
        consumed_samples: Samples trained on. None if the checkpoint does not state it.
    """

    readers: Readers
    step: float
    iteration: int
    consumed_samples: int | None = None


def as_source(state: MegatronState, described: DescribedModel, *, where: object) -> StateSource:
    """Return a Megatron state as our source.

    Weights are the optimizer's copies, which must round to the model's own. One Megatron tensor is in memory at a time,
    beside ours.
    """
    model = described.model
    tensors = by_our_name(described.correspondences())
    names = stored_tensors(model)

    def read(name: str) -> torch.Tensor:
        if name in names:
            correspondence = tensors[name]
            weight = correspondence.take(name, _weight(state, correspondence.tensor, where=where))
            return weight.to(torch.float32) + 1 if described.adds_one and is_norm(correspondence.tensor) else weight
        kind, _, weight_name = name.partition(".")
        if kind == _STEP:
            return torch.tensor(float(state.step))
        return tensors[weight_name].take(weight_name, state.readers[kind](tensors[weight_name].tensor))

    if MOMENTS[0] not in state.readers:
        return StateSource(model, 0, has_optimizer=False, read=read)
    return StateSource(model, state.iteration, has_optimizer=True, read=read, consumed_samples=state.consumed_samples)


def _weight(state: MegatronState, tensor: MegatronTensor, *, where: object) -> torch.Tensor:
    """Return a weight or, if it exists, the optimizer's copy, which must round to the model's own."""
    if MASTERS not in state.readers:
        return state.readers[WEIGHTS](tensor)
    weights, masters = partial(state.readers[WEIGHTS], tensor), partial(state.readers[MASTERS], tensor)
    rounded = rounding_to(weights, masters)
    if rounded is not None:
        return rounded
    weight, master, name = weights(), masters(), f"{where}, {tensor.numbered}"
    require_finite(master, where=name)  # NaN is never equal to itself
    require_finite(weight, where=name)
    raise CheckpointError(
        "The optimizer's copy of a weight differs from the model's",
        where=name,
        expected=f"the same numbers, rounded to {weight.dtype}",
        found=f"{int((master.to(weight.dtype) != weight).count_nonzero())} of {weight.numel()} differ",
        fix="The files come from different saves, or the optimizer's state has another layout.",
    )


def rounding_to(weights: Callable[[], torch.Tensor], masters: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """Return the optimizer's copy of a weight, or None if it does not round to the model's own.

    Digests are compared first. If they agree, only a single tensor is in memory at a time.

    Args:
        weights: Reads the weight in the model's dtype.
        masters: Reads the optimizer's copy.
    """
    weight = weights()
    digest, dtype = _digest(weight), weight.dtype
    del weight
    master = masters()
    # Zeros may differ in sign.
    return master if _digest(master.to(dtype)) == digest or torch.equal(master.to(dtype), weights()) else None


def _digest(tensor: torch.Tensor) -> bytes:
    data: memoryview = tensor.reshape(-1).contiguous().view(torch.uint8).numpy()  # type: ignore[assignment]
    return xxhash.xxh3_128(data).digest()


def consumed_samples(table: Mapping[str, Any], args: Mapping[str, Any]) -> int | None:
    """Return the consumed samples from the arguments or, by default, from the schedule, which counts samples."""
    schedule = table.get("opt_param_scheduler")
    counted = schedule.get("num_steps") if isinstance(schedule, Mapping) else None
    counts = [args.get("consumed_train_samples"), counted]
    return next((count for count in counts if type(count) is int and count >= 0), None)


def log_omissions(
    table: Mapping[str, Any],
    described: DescribedModel,
    args: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Log notes on the model, and what is not carried over: the schedule, and the sample order and length.

    Args:
        args: Megatron's arguments.
        table: A checkpoint's unsharded part: `common.pt`, or a rank's file in the `torch` format.
        groups: The optimizer's parameter groups. By default those in `table`.
    """
    for note in described.notes:
        _log.warning(note)
    schedule = table.get("opt_param_scheduler")
    if isinstance(schedule, Mapping):
        settings = ", ".join(f"{name} {shown(schedule[name])}" for name in _SCHEDULE if name in schedule)
        _log.info(
            f"the schedule was {settings.replace(chr(39), '')}, in samples: not carried over, the continued run "
            "has its own, schedule.*"
        )
    log_settings(groups or parameter_groups(table.get("optimizer")))
    length = args.get("seq_length")
    if type(length) is int:
        _log.info(f"consumed samples are counted in samples of {length} tokens: import with train.seq_length={length}")
    _log.warning("Sample order is not carried over: a run counts on from Megatron's consumed samples, in its own order")


def signs_of_moments(table: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the evidence for saved moments: an optimizer, or a training iteration.

    Args:
        table: A checkpoint's unsharded part. See `log_omissions`.
        folder: The iteration's folder. A `release` folder has weights alone.
    """
    signs = ["the settings of an optimizer"] if table.get("optimizer") is not None else []
    iteration = table.get("iteration")
    if type(iteration) is int and iteration > 0 and folder.name != RELEASE:
        signs.append(f"iteration {iteration}")
    return signs


def parameter_groups(optimizer: object) -> list[Mapping[str, Any]]:
    """Return the parameter groups in an optimizer's state, which may be nested."""
    if not isinstance(optimizer, Mapping):
        return []
    groups = optimizer.get("param_groups")
    if isinstance(groups, list):
        return [group for group in groups if isinstance(group, Mapping)]
    return parameter_groups(optimizer.get("optimizer"))
