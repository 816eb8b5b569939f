"""Saving and loading any torch model and optimizer in two calls, outside our trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from trainer.checkpoint.format.layout import TensorKind
from trainer.checkpoint.group import open_channel
from trainer.checkpoint.inline_save import keep_problem, require_path, save_now
from trainer.checkpoint.loaded import LoadedState, Matched, match
from trainer.checkpoint.loading.choose import LoadSource
from trainer.checkpoint.loading.reader import Checkpoint, read_places
from trainer.checkpoint.loading.restorer import Restorer
from trainer.checkpoint.model_contents import contents_of_model
from trainer.checkpoint.nested.documents import read_values
from trainer.checkpoint.nested.stored_names import MODEL, OPTIMIZER
from trainer.checkpoint.optimizer_state import check_optimizer, make_state, set_groups
from trainer.checkpoint.tensors.live import Grid, LiveTensor, live_tensors


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
    `save_state_dict` saves ranks that hold different tensors, such as the stages of a pipeline, and groups of ranks.

    Args:
        state: JSON values of your own, given back by `load`; the same on all ranks.
        max_checkpoint_keep: how many checkpoints stay in `folder`, the newest ones; 0 keeps all.
        from_rank0: shell patterns for the names of tensors that differ between ranks by design, such as the BatchNorm
            statistics of DDP (`["*.running_*", "*.num_batches_tracked"]`). Rank 0's are saved. All other tensors that
            several ranks hold must be equal bit for bit.

    Raises:
        ConfigError: on a rank whose `folder` is a URL, or whose number or patterns are none; on the others it is a
            CheckpointError.
        ReplicaError: on rank 0, if ranks hold different bits of one tensor; on the others it is a CheckpointError.
        TrainerError: if the ranks give different models, optimizers, iterations or `state`, or the checkpoint could not
            be written; nothing that was committed is touched.
    """
    channel, nonce = open_channel()
    contents = contents_of_model(
        channel,
        "save",
        model,
        optimizer,
        folder=folder,
        iteration=iteration,
        state=state,
        from_rank0=from_rank0,
        problem=keep_problem(max_checkpoint_keep),
    )
    return save_now(folder, contents, channel, iteration=iteration, nonce=nonce, keep=max_checkpoint_keep)


def load(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, strict: bool = True
) -> LoadedState:
    """Fill a model and its optimizer in place from one iteration folder, or the newest valid one of a run's folder.

    Optimizer state is found by parameter name, made where the optimizer has none yet, and the numbers of each parameter
    group (learning rate, decay ...) are set from the group that held the same parameters. Without `strict`, tensors
    that are not asked for are left out, and those that the checkpoint lacks keep their values; both are logged.

    Returns:
        The `state` given to `save`, and `iteration`: a dict, whose `missing_keys` and `unexpected_keys` list the names
        that a load without `strict` has not found on either side.

    Raises:
        TrainerError: if the checkpoint is damaged, has a tensor of another shape or dtype, or was saved with an
            optimizer of another class; with `strict`, also if it lacks a tensor, or has others of the model, or of the
            optimizer where one is given.
    """
    channel, nonce = open_channel()
    with channel.agreed("given"):
        require_path(path)
    matched = Matched([])
    kinds = {TensorKind.MODEL} if optimizer is None else {TensorKind.MODEL, TensorKind.OPTIMIZER}

    def live(checkpoint: Checkpoint) -> Sequence[LiveTensor]:
        nonlocal matched
        if optimizer is not None:
            places = read_places(checkpoint).items()
            specs = {name: place.spec for name, place in places if place.spec.kind is TensorKind.OPTIMIZER}
            make_state(model, optimizer, specs, where=checkpoint.path)
        found = list(live_tensors(model, optimizer, grid=Grid.of(channel.ranks)))
        matched = match(checkpoint, found, strict=strict, is_asked=lambda spec: spec.kind in kinds)
        return matched.live

    def check(checkpoint: Checkpoint) -> None:
        read_values(checkpoint)
        if optimizer is not None:
            check_optimizer(checkpoint, optimizer)

    checkpoint = Restorer(channel, nonce=nonce).restore(LoadSource(Path(path)), check=check, live=live).checkpoint
    matched.log(checkpoint, is_first=channel.coordinates)
    values = read_values(checkpoint)
    if optimizer is not None:
        set_groups(model, optimizer, values.groups.get("/optimizer", []))
    state = values.nested(without=(MODEL, OPTIMIZER[0]))
    return LoadedState({**state, "iteration": checkpoint.iteration}, matched.missing, matched.unexpected)
