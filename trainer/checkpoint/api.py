"""Saving and loading any torch model and optimizer in two calls, outside our trainer."""

from __future__ import annotations

import fnmatch
import json
import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.commit.channel import StoreChannel, single_rank_channel
from trainer.checkpoint.format import json_file
from trainer.checkpoint.format.json_file import Json
from trainer.checkpoint.format.layout import DEFAULT_FILE_BYTES, TensorKind, refuse_unstorable
from trainer.checkpoint.format.manifest import DIGEST_BYTES, MOST_ELEMENTS
from trainer.checkpoint.format.names import FORMAT, STATE
from trainer.checkpoint.loading.choose import LoadSource
from trainer.checkpoint.loading.loader import check_tensors
from trainer.checkpoint.loading.reader import Checkpoint, read_places
from trainer.checkpoint.loading.restorer import Restorer
from trainer.checkpoint.policy import Retention, SavePolicy
from trainer.checkpoint.tensors.live import (
    Contents,
    Grid,
    LiveTensor,
    aliases_of,
    live_tensors,
    local_of,
    parameter_names,
)
from trainer.errors import CheckpointError, ConfigError, MismatchError, TrainerError
from trainer.regular_file import is_url

_log = logging.getLogger(__name__)

_COMMIT_TIMEOUT_S = 1800.0
_MOST_NAMED = 5
_PARTS = ("`state`", "numbers of the optimizer, such as learning rates", "from_rank0")


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    iteration: int,
    state: Mapping[str, object] | None = None,
    max_checkpoint_keep: int = 0,
    from_rank0: Sequence[str] = (),
) -> Path:
    """Save a model and its optimizer as `folder/iter_<iteration>`, and return that path.

    To be called by all ranks of the default process group; tensors may be plain (replicated on all ranks) or DTensors
    (FSDP2, tensor parallelism). The folder holds whole tensors under the parameters' names, whatever the topology.

    Args:
        state: JSON values of your own, given back by `load`; the same on all ranks.
        max_checkpoint_keep: how many checkpoints stay in `folder`, the newest ones; 0 keeps all.
        from_rank0: shell patterns for the names of tensors that differ between ranks by design, such as the BatchNorm
            statistics of DDP (`["*.running_*", "*.num_batches_tracked"]`). Rank 0's are saved. All other tensors that
            several ranks hold must be equal bit for bit.

    Raises:
        ConfigError: on a rank whose `folder` is a URL; on the others it is a CheckpointError.
        ReplicaError: on rank 0, if ranks hold different bits of one tensor; on the others it is a CheckpointError.
        TrainerError: if the ranks give different models, optimizers, iterations or `state`, or the checkpoint could not
            be written; nothing that was committed is touched.
    """
    channel, nonce = _channel()
    contents, problem = None, None
    try:
        document = _document(folder, model, optimizer, iteration, state)
        contents = _contents(channel, model, optimizer, document, from_rank0)
    except TrainerError as error:
        problem = error
    summary = b"" if contents is None else _summary(document, from_rank0)
    summaries = channel.gather("summaries", summary)
    channel.agree("given", problem or _difference(summaries))  # else the other ranks would wait for one that has failed
    assert contents is not None
    policy = SavePolicy(Path(folder), retention=Retention(max_checkpoint_keep), file_bytes=DEFAULT_FILE_BYTES)
    checkpointer = Checkpointer(policy, channel, nonce=nonce)
    try:
        checkpointer.start()
        report = checkpointer.save(iteration, contents)
    finally:
        checkpointer.close()
    assert report is not None
    if report.error is not None:
        raise report.error
    return report.path


def load(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, strict: bool = True
) -> dict[str, object]:
    """Fill a model and its optimizer in place from one iteration folder, or the newest valid one of a run's folder.

    Optimizer state is found by parameter name, made where the optimizer has none yet, and the numbers of each parameter
    group (learning rate, decay ...) are set from the group that held the same parameters. Without `strict`, tensors
    that are not asked for are left out, and rank 0 logs a warning with their count and the first names.

    Returns:
        The `state` given to `save`, and `iteration`.

    Raises:
        TrainerError: if the checkpoint is damaged, lacks a tensor that is asked for, or was saved with an optimizer of
            another class; with `strict`, also if it has others of the model, or of the optimizer where one is given.
    """
    channel, nonce = _channel()
    left_out: list[str] = []

    def live(checkpoint: Checkpoint) -> list[LiveTensor]:
        places = read_places(checkpoint)
        if optimizer is not None:
            shapes = {name: p.spec.shape for name, p in places.items() if p.spec.kind is TensorKind.OPTIMIZER}
            _make_state(model, optimizer, shapes, where=checkpoint.path)
        found = list(live_tensors(model, optimizer, grid=Grid.flat(channel.world_size)))
        names = {t.spec.name for t in found}
        known = places if strict else {name: place for name, place in places.items() if name in names}
        kinds = {TensorKind.MODEL} if optimizer is None else {TensorKind.MODEL, TensorKind.OPTIMIZER}
        left_out[:] = [name for name, p in places.items() if name not in known and p.spec.kind in kinds]
        check_tensors([t.spec for t in found], known, where=checkpoint.path)
        return found

    def check(checkpoint: Checkpoint) -> None:
        _user(checkpoint)
        if optimizer is not None:
            _saved_groups(checkpoint)
            _check_optimizer(checkpoint, optimizer)

    checkpoint = Restorer(channel, nonce=nonce).restore(LoadSource(Path(path)), check=check, live=live).checkpoint
    if left_out and channel.rank == 0:
        shown = ", ".join(left_out[:_MOST_NAMED]) + (", ..." if len(left_out) > _MOST_NAMED else "")
        _log.warning(f"not loaded from {checkpoint.path}: {len(left_out)} tensors that nothing given has: {shown}")
    if optimizer is not None:
        _set_groups(model, optimizer, _saved_groups(checkpoint))
    return {**_user(checkpoint), "iteration": checkpoint.iteration}


def _document(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    iteration: int,
    state: Mapping[str, object] | None,
) -> Json:
    """Return the state file of a save into `folder`.

    Raises:
        ConfigError: `folder` is a URL.
        CheckpointError: for an iteration that no folder is named after, or a `state` with values that JSON lacks.
    """
    if is_url(str(folder)):
        raise ConfigError("A checkpoint folder is a URL; only mounted file systems can be written", found=folder)
    if type(iteration) is not int or not 0 <= iteration <= MOST_ELEMENTS:
        raise CheckpointError(
            "This is no number of an iteration", expected="an int of 0 or more", found=repr(iteration)
        )
    document: Json = {"format": FORMAT, "iteration": iteration, "user": dict(state or {}), "groups": []}
    if optimizer is not None:
        document |= {"optimizer": {"name": type(optimizer).__name__}, "groups": _groups(model, optimizer)}
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
    found = live_tensors(model, optimizer, grid=Grid.flat(channel.world_size))
    live = _rank0_alone(list(found), from_rank0, channel.rank)
    specs = tuple(tensor.spec for tensor in live)
    refuse_unstorable(specs)
    return Contents(specs, live, aliases_of(model), {STATE: document})


def _summary(document: Json, from_rank0: Sequence[str]) -> bytes:
    """Return digests of the arguments that all ranks must give alike, beside the tensors, in the order of `_PARTS`."""
    numbers = [group["numbers"] for group in document["groups"]]
    parts = (document["user"], [document.get("optimizer"), numbers], sorted(from_rank0))
    found = (json_file.parse(json_file.to_bytes({"": part}), where=STATE) for part in parts)  # all keys are text then
    return b"".join(xxhash.xxh3_64_digest(json.dumps(part, sort_keys=True).encode()) for part in found)


def _difference(summaries: Sequence[bytes]) -> CheckpointError | None:
    """Return the error to raise where ranks, in their order, differ; the summary of a rank that failed is empty."""
    given = {rank: summary for rank, summary in enumerate(summaries) if summary}
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


def _rank0_alone(live: Sequence[LiveTensor], patterns: Sequence[str], rank: int) -> tuple[LiveTensor, ...]:
    """Let rank 0 alone save the tensors whose names fit a pattern."""
    names = {tensor.spec.name: [p for p in patterns if fnmatch.fnmatchcase(tensor.spec.name, p)] for tensor in live}
    unused = set(patterns) - {pattern for fitting in names.values() for pattern in fitting}
    if unused:
        raise CheckpointError(
            "A pattern in from_rank0 fits no tensor",
            found=", ".join(sorted(unused)),
            fix="Correct it, or leave it out; `save` names tensors as `model.named_parameters()` does.",
        )
    return tuple(
        (replace(tensor, replicas=(0,)) if rank == 0 else replace(tensor, is_copy=True))
        if names[tensor.spec.name] and 0 in tensor.replicas
        else tensor
        for tensor in live
    )


def _channel() -> tuple[StoreChannel, str]:
    """Return a channel on the default process group's store, and a nonce that all ranks share."""
    if not dist.is_available() or not dist.is_initialized():
        return single_rank_channel(), secrets.token_hex(4)
    store: Store = distributed_c10d._get_default_store()  # torch has no public name for it
    count = int(store.add(f"reprise/calls/{dist.get_rank()}", 1))
    store = PrefixStore(f"reprise/{count}", store)
    channel = StoreChannel(store, dist.get_rank(), world_size=dist.get_world_size(), timeout_s=_COMMIT_TIMEOUT_S)
    nonce = secrets.token_hex(4).encode() if channel.rank == 0 else None
    return channel, channel.broadcast("nonce", nonce).decode()


def _check_optimizer(checkpoint: Checkpoint, optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizer state that `optimizer` would not understand: its next step would fail, or be wrong."""
    if not checkpoint.has_optimizer and not checkpoint.state.get("groups"):
        raise MismatchError(
            "The checkpoint was saved without an optimizer", where=checkpoint.path, fix="Load the model alone."
        )
    named = checkpoint.state.get("optimizer", {})
    saved, given = named.get("name") if isinstance(named, dict) else named, type(optimizer).__name__
    if saved is not None and saved != given:
        raise MismatchError(
            "The checkpoint was saved with an optimizer of another class",
            where=checkpoint.path,
            expected=given,
            found=saved,
            fix=f"Give a {saved}, or load the model alone.",
        )


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Json]:
    names = parameter_names(model)
    return [
        {
            "names": [names[parameter] for parameter in group["params"] if parameter in names],
            "numbers": {k: v for k, v in group.items() if k != "params" and _is_plain(v)},
        }
        for group in optimizer.param_groups
    ]


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(isinstance(item, (int, float)) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _user(checkpoint: Checkpoint) -> Json:
    """Return the `state` that was given to `save`."""
    user = checkpoint.state.get("user", {})
    if not isinstance(user, dict):
        raise _malformed(checkpoint, "user", user)
    return user


def _saved_groups(checkpoint: Checkpoint) -> list[Json]:
    """Return the parameter groups as `_groups` has written them."""
    groups = checkpoint.state.get("groups", [])
    for group in groups if isinstance(groups, list) else [groups]:
        names, numbers = (group.get(key) for key in ("names", "numbers")) if isinstance(group, dict) else (None, None)
        is_named = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not (is_named and isinstance(numbers, dict) and all(map(_is_plain, numbers.values()))):
            raise _malformed(checkpoint, "groups", group)
    return list(groups)


def _malformed(checkpoint: Checkpoint, member: str, found: object) -> CheckpointError:
    where = f"{checkpoint.path / STATE}, {member}"
    return CheckpointError("A state file is malformed", where=where, expected="what `save` writes", found=repr(found))


def _set_groups(model: nn.Module, optimizer: torch.optim.Optimizer, saved: list[Json]) -> None:
    """Set each parameter group's numbers from the saved group that held its first parameter."""
    names = parameter_names(model)
    by_name = {name: group["numbers"] for group in saved for name in group["names"]}
    for group in optimizer.param_groups:
        numbers = by_name.get(names[group["params"][0]], {}) if group["params"] else {}
        for key, value in numbers.items():
            if key in group:
                group[key] = tuple(value) if isinstance(value, list) and isinstance(group[key], tuple) else value


def _make_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, shapes: Mapping[str, tuple[int, ...]], *, where: Path
) -> None:
    """Make the optimizer state that the checkpoint has and the optimizer lacks, as zeros, without a fake step.

    Raises:
        MismatchError: for state that is larger than a square matrix over a dimension of its parameter, the largest
            that optimizers keep: memory is not for the asking.
    """
    by_name = {name: parameter for parameter, name in parameter_names(model).items()}
    for full_name, shape in shapes.items():
        key, _, name = full_name.partition(".")
        parameter = by_name.get(name)
        if parameter is None or key in optimizer.state[parameter]:
            continue
        most = max(parameter.numel(), max(parameter.shape, default=1) ** 2)
        if math.prod(shape) > most:
            raise MismatchError(
                "The checkpoint has optimizer state that is too large for its parameter",
                where=f"{where}, tensor {full_name}",
                expected=f"at most {most} elements",
                found=f"shape {list(shape)}",
                fix="Load the model alone.",
            )
        if shape == tuple(parameter.shape) and key != "step":
            optimizer.state[parameter][key] = torch.zeros_like(parameter.detach())
        else:
            on_device = any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)
            device = local_of(parameter).device if on_device else torch.device("cpu")
            optimizer.state[parameter][key] = torch.zeros(shape, dtype=torch.float32, device=device)
