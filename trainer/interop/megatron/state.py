"""Converts a Megatron checkpoint's tensors, from either format, to ours: joined over its ranks, under our names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from reprise.storage import integer, shown
from trainer.interop.formats import ImportOptions, common_step, log_settings, parameter_groups, require_moments
from trainer.interop.masters import checked_master
from trainer.interop.megatron.arguments import describe
from trainer.interop.megatron.hybrid import as_hybrid, is_hybrid, layers_of
from trainer.interop.megatron.names import MegatronTensor, correspondences, is_norm
from trainer.interop.megatron.shards import Pieces, compare_copies, join, joined_shape
from trainer.interop.source import MOMENTS, StateSource, by_kind
from trainer.interop.stored import FileTensor, require_fit

_log = logging.getLogger(__name__)

WEIGHTS, MASTERS = "weights", "masters"
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
RELEASE = "release"  # the folder of a released model, which has no run to continue
_OTHER_SAVE = "The files come from different saves, or the optimizer's state has another layout."
_SCHEDULE = ("lr_decay_style", "max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps")

Groups = Sequence[Mapping[str, Any]]
Joined = Mapping[str, FileTensor]


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """An optimizer's content.

    Args:
        pieces: The parts of each moment, and of the weight copies (`MASTERS`) if there are any.
        groups: The parameter groups.
        steps: Step counts, which must be equal. None is ignored.
    """

    pieces: Mapping[str, Pieces]
    groups: Groups
    steps: Sequence[object]


@dataclass(frozen=True, slots=True)
class MegatronCheckpoint:
    """A Megatron checkpoint.

    Args:
        path: The iteration's folder.
        table: The unsharded part: `common.pt`, or a rank's file in the `torch` format.
        args: The saving program's arguments.
        stages: The number of pipeline stages in the files. Of several, the last has a copy of a tied embedding.
        optimizer: Returns the optimizer's content for a model's tensors and joined weights, or None without one.
    """

    path: Path
    table: Mapping[Any, Any]
    args: Mapping[str, Any]
    weights: Pieces
    stages: int
    optimizer: Callable[[Sequence[MegatronTensor], Joined], SavedOptimizer | None]


def as_source(saved: MegatronCheckpoint, options: ImportOptions) -> StateSource:
    """Return a Megatron checkpoint as our source.

    Weights are the optimizer's copies, which must round to the model's own. Two Megatron tensors and a part are
    in memory at a time.

    Raises:
        CheckpointError: Step counts differ.
        MismatchError: The checkpoint holds another model, or lacks moments that are not left out by the options.
    """
    where, weights = saved.path, saved.weights
    rows = sum(piece.shape[0] for piece in weights[EMBEDDING])
    hybrid_layers = layers_of(weights) if is_hybrid(weights) else None
    described = describe(saved.args, rows, options, where=where, hybrid_layers=hybrid_layers)
    model, every = described.model, correspondences(described.model, rows)
    if hybrid_layers is not None:
        every = [*map(as_hybrid, every)]
    tensors = [correspondence.tensor for correspondence in every]
    joined_of = partial(_joined, tensors, has_copy=model.tie_word_embeddings and saved.stages > 1, where=where)
    joined = {WEIGHTS: joined_of(WEIGHTS, weights)}
    optimizer = None if options.weights_only else saved.optimizer(tensors, joined[WEIGHTS])
    for note in described.notes:
        _log.warning(note)
    _log_omissions(saved, optimizer.groups if optimizer else parameter_groups(saved.table.get("optimizer")))
    iteration, step = integer(saved.table.get("iteration")) if optimizer else 0, None
    if optimizer is not None:
        joined |= {kind: joined_of(kind, pieces) for kind, pieces in optimizer.pieces.items()}
        step = common_step(optimizer.steps)
        if step is None:
            _log.warning(f"The optimizer has no step count: assumed to be the iteration, {iteration}")
    else:
        require_moments(_signs_of_moments(saved), options, where=where)
        _log.warning("Only the weights are imported, as iteration 0")
    sources = {name: correspondence for correspondence in every for name in correspondence.names}

    def moment(kind: str, name: str) -> torch.Tensor:
        return sources[name].take(name, joined[kind][sources[name].tensor.numbered].read())

    def weight(name: str) -> torch.Tensor:
        tensor = sources[name].tensor
        read, place = joined[WEIGHTS][tensor.numbered].read, f"{where}, {tensor.numbered}"
        if MASTERS in joined:
            read = partial(checked_master, read, joined[MASTERS][tensor.numbered].read, where=place, fix=_OTHER_SAVE)
        values = sources[name].take(name, read())
        return values.to(torch.float32) + 1 if described.adds_one and is_norm(tensor) else values

    read = by_kind(weight, moment, lambda _: iteration if step is None else step)
    samples = _consumed_samples(saved) if optimizer else None
    return StateSource(model, iteration, optimizer is not None, read, consumed_samples=samples)


def _joined(tensors: Sequence[MegatronTensor], kind: str, pieces: Pieces, *, has_copy: bool, where: Path) -> Joined:
    """Return a kind's tensors, joined when they are read. A tied embedding may have a copy on the last stage."""
    expected, joined = {tensor.numbered: tensor for tensor in tensors}, dict[str, FileTensor]()
    for name, parts in pieces.items():
        tensor = expected.get(EMBEDDING if name == OUTPUT and has_copy else name)
        cut, is_gated = (None, False) if tensor is None else (tensor.cut, tensor.is_gated)
        read = partial(join, parts, cut=cut, is_gated=is_gated, where=f"{where}, {kind} of {name}")
        joined[name] = FileTensor(joined_shape(parts, cut), parts[0].dtype, read)
    shapes = {name: tensor.shape for name, tensor in expected.items()}
    fix = "If its arguments do not describe the model, set model.KEY=VALUE, such as model.tie_word_embeddings=false."
    if kind != WEIGHTS:
        fix = "Only one Adam for all parameters is supported. Import the weights alone with --weights-only."
    require_fit(joined, shapes, lambda name: has_copy and name == OUTPUT, where=f"{where}, {kind}", fix=fix)
    if has_copy and OUTPUT in joined and kind not in MOMENTS:
        first, last, place = joined[EMBEDDING], joined[OUTPUT], f"{where}, {kind} of {EMBEDDING}"

        def read_same() -> torch.Tensor:
            table = first.read()
            compare_copies(table, last.read(), what="the first and the last stage", where=place)
            return table

        joined[EMBEDDING] = replace(first, read=read_same)
    return joined


def _consumed_samples(saved: MegatronCheckpoint) -> int | None:
    """Return the consumed samples from the arguments or, by default, from the schedule, which counts samples."""
    schedule = saved.table.get("opt_param_scheduler")
    counted = schedule.get("num_steps") if isinstance(schedule, Mapping) else None
    counts = [saved.args.get("consumed_train_samples"), counted]
    return next((count for count in counts if type(count) is int and count >= 0), None)


def _log_omissions(saved: MegatronCheckpoint, groups: Groups) -> None:
    """Log what is not carried over: the schedule, and the sample order and length."""
    schedule = saved.table.get("opt_param_scheduler")
    if isinstance(schedule, Mapping):
        settings = ", ".join(f"{name} {shown(schedule[name])}" for name in _SCHEDULE if name in schedule)
        _log.info(
            f"the schedule was {settings.replace(chr(39), '')}, in samples: not carried over, the continued run "
            "has its own, schedule.*"
        )
    log_settings(groups)
    length = saved.args.get("seq_length")
    if type(length) is int:
        _log.info(f"consumed samples are counted in samples of {length} tokens: import with train.seq_length={length}")
    _log.warning("Sample order is not carried over: a run counts on from Megatron's consumed samples, in its own order")


def _signs_of_moments(saved: MegatronCheckpoint) -> list[str]:
    """Return the evidence for saved moments: an optimizer, or a training iteration."""
    signs = ["the settings of an optimizer"] if saved.table.get("optimizer") is not None else []
    iteration = saved.table.get("iteration")
    if type(iteration) is int and iteration > 0 and saved.path.name != RELEASE:
        signs.append(f"iteration {iteration}")
    return signs
