"""The contents of a checkpoint of a model and its optimizer, after all ranks have given the same ones."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import xxhash
from torch import nn

from trainer.checkpoint.commit.channel import StoreChannel
from trainer.checkpoint.format import json_file
from trainer.checkpoint.format.json_file import Json
from trainer.checkpoint.format.layout import refuse_unstorable
from trainer.checkpoint.format.manifest import DIGEST_BYTES
from trainer.checkpoint.format.names import FORMAT, STATE
from trainer.checkpoint.inline_save import check_patterns, check_target
from trainer.checkpoint.optimizer_state import groups_of
from trainer.checkpoint.tensors.live import Contents, Grid, LiveTensor, aliases_of, live_tensors
from trainer.errors import CheckpointError, TrainerError

_PARTS = ("`state`", "numbers of the optimizer, such as learning rates", "from_rank0")


def contents_of_model(
    channel: StoreChannel,
    key: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    folder: str | Path,
    iteration: int,
    state: Mapping[str, object] | None,
    from_rank0: Sequence[str],
    problem: TrainerError | None = None,
) -> Contents:
    """Return what is saved of a model and its optimizer. A call of all ranks.

    Args:
        key: of the messages, new on this channel.
        problem: why this rank cannot save, if it knows a reason already.

    Raises:
        TrainerError: on every rank, if one of them cannot save, or they give different arguments.
    """
    contents, document = None, dict[str, object]()
    try:
        check_target(folder, iteration)
        check_patterns(from_rank0)
        document = _document(model, optimizer, iteration, state)
        contents = _contents(channel, model, optimizer, document, from_rank0)
    except TrainerError as error:
        problem = problem or error
    summary = b"" if contents is None else _summary(document, from_rank0)
    summaries = channel.gather(f"{key}/summaries", summary)
    # Else the other ranks would wait for one that has failed.
    channel.agree(f"{key}/given", problem or _difference(dict(zip(channel.ranks, summaries, strict=False))))
    assert contents is not None
    return contents


def _document(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    iteration: int,
    state: Mapping[str, object] | None,
) -> Json:
    """Return the state file of a save.

    Raises:
        CheckpointError: for a `state` with values that JSON lacks.
    """
    document: Json = {"format": FORMAT, "iteration": iteration, "user": dict(state or {}), "groups": []}
    if optimizer is not None:
        document |= {"optimizer": {"name": type(optimizer).__name__}, "groups": groups_of(model, optimizer)}
    json_file.to_bytes(document)
    return document


def _contents(
    channel: StoreChannel,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    document: Json,
    from_rank0: Sequence[str],
) -> Contents:
    """Return the contents of the checkpoint to be saved.

    Raises:
        CheckpointError: naming a tensor that cannot be stored, or a pattern that fits none.
    """
    found = live_tensors(model, optimizer, grid=Grid.of(channel.ranks))
    live = _rank0_alone(list(found), from_rank0, channel.rank, channel.coordinator)
    specs = tuple(tensor.spec for tensor in live)
    refuse_unstorable(specs)
    optimizers = () if optimizer is None else (optimizer,)
    return Contents(specs, live, aliases_of(model), {STATE: document}, optimizers)


def _summary(document: Json, from_rank0: Sequence[str]) -> bytes:
    """Return digests of the arguments that all ranks must give alike, beside the tensors, in the order of `_PARTS`."""
    numbers = [group["numbers"] for group in document["groups"]]
    parts = (document["user"], [document.get("optimizer"), numbers], sorted(from_rank0))
    found = (json_file.parse(json_file.to_bytes({"": part}), where=STATE) for part in parts)  # all keys are text then
    return b"".join(xxhash.xxh3_64_digest(json.dumps(part, sort_keys=True).encode()) for part in found)


def _difference(summaries: Mapping[int, bytes]) -> CheckpointError | None:
    """Return the error to raise where ranks differ; the summary of a rank that failed is empty."""
    given = {rank: summary for rank, summary in sorted(summaries.items()) if summary}
    for number, part in enumerate(_PARTS):
        at = slice(number * DIGEST_BYTES, (number + 1) * DIGEST_BYTES)
        odd = [rank for rank in given if given[rank][at] != given[min(given)][at]]
        if odd:
            return CheckpointError(
                f"The ranks give different {part}",
                expected="the same on every rank, as one file holds it",
                found=f"another on rank {odd[0]} than on rank {min(given)}",
                fix="Nothing was saved. Gather what differs by rank first, and give all of it on every rank.",
            )
    return None


def _rank0_alone(
    live: Sequence[LiveTensor], patterns: Sequence[str], rank: int, coordinator: int
) -> tuple[LiveTensor, ...]:
    """Let the coordinator, which is rank 0, alone save the tensors whose names fit a pattern."""
    names = {tensor.spec.name: [p for p in patterns if fnmatch.fnmatchcase(tensor.spec.name, p)] for tensor in live}
    unused = set(patterns) - {pattern for fitting in names.values() for pattern in fitting}
    if unused:
        raise CheckpointError(
            "A pattern in from_rank0 fits no tensor",
            found=", ".join(sorted(unused)),
            fix="Correct it, or leave it out; `save` names tensors as `model.named_parameters()` does.",
        )
    return tuple(
        (replace(tensor, replicas=(rank,)) if rank == coordinator else replace(tensor, is_copy=True))
        if names[tensor.spec.name] and coordinator in tensor.replicas
        else tensor
        for tensor in live
    )
