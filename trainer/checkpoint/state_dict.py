"""Saving and loading nested state dicts: any tensors and values, on any group of ranks, each with keys of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.checkpoint.commit.channel import StoreChannel
from trainer.checkpoint.format.names import STATE
from trainer.checkpoint.group import open_channel
from trainer.checkpoint.inline_save import check_patterns, check_target, keep_problem, require_path, save_now
from trainer.checkpoint.loaded import LoadedState
from trainer.checkpoint.loading.choose import LoadSource
from trainer.checkpoint.loading.restorer import Restorer
from trainer.checkpoint.nested.agreement import KnownTables, agree_on_state
from trainer.checkpoint.nested.documents import NestedValues, read_values, values_of
from trainer.checkpoint.nested.filling import Filling
from trainer.checkpoint.nested.held import hold, require_patterns
from trainer.checkpoint.nested.table import require_whole
from trainer.checkpoint.nested.tree import take_apart
from trainer.checkpoint.tensors.live import Contents, free_gathered_parameters
from trainer.errors import TrainerError

# What the ranks of each group know of each other, of saves and of loads.
_known: dict[tuple[str, tuple[int, ...]], KnownTables] = {}


def save_state_dict(
    folder: str | Path,
    state_dict: dict[str, Any],
    *,
    iteration: int,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    max_checkpoint_keep: int = 0,
    from_rank0: Sequence[str] = (),
    model: nn.Module | None = None,
) -> Path:
    """Save a nested state dict as `folder/iter_<iteration>`, and return that path. A call of all ranks of the group.

    Dicts and lists hold tensors, DTensors and JSON values. Each rank gives the keys that it has: what several ranks
    give under one name must be equal, bit for bit, and a stage of a pipeline gives its own tensors only. Optimizers are
    given as `get_optimizer_state_dict` of `torch.distributed.checkpoint.state_dict` returns them. Tensors under
    `"model"` become the weights of the folder, so that transformers opens it where the names are those it uses.

    Args:
        process_group: the ranks that save; None for all. The others have no part in it, and go on meanwhile.
        coordinator_rank: the global rank that takes the lock of the folder, decides, and renames.
        max_checkpoint_keep: how many checkpoints stay in `folder`, the newest ones; 0 keeps all.
        from_rank0: shell patterns for the stored names of tensors that differ between ranks by design, such as
            `["*.running_*"]`; the lowest rank that holds one saves it.
        model: names the parameters where an optimizer is given as `optimizer.state_dict()`, with numbers for them.

    Raises:
        ConfigError: for a folder that is a URL, a number or patterns that are none, or a rank or coordinator outside
            the group.
        ReplicaError: on the coordinator, if ranks hold different bits of one tensor; a CheckpointError on the others.
        TrainerError: naming what cannot be saved, or differs between ranks; nothing that was committed is touched.
    """
    channel, nonce = open_channel(process_group, coordinator_rank=coordinator_rank)
    contents = contents_of_state_dict(
        channel,
        "save",
        state_dict,
        known=known_tables("save", channel),
        folder=folder,
        iteration=iteration,
        from_rank0=from_rank0,
        model=model,
        problem=keep_problem(max_checkpoint_keep),
    )
    return save_now(folder, contents, channel, iteration=iteration, nonce=nonce, keep=max_checkpoint_keep)


def load_state_dict(
    path: str | Path,
    state_dict: dict[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    model: nn.Module | None = None,
    strict: bool = True,
) -> LoadedState:
    """Fill a nested state dict in place from one iteration folder, or the newest valid one of a run's folder.

    Tensors are filled, JSON values are replaced in their dicts and lists, at any topology and under any division of the
    keys among ranks. A load is about the outermost keys that any rank gives; others of the checkpoint are left out.

    Args:
        process_group: as for `save_state_dict`.
        coordinator_rank: the global rank that chooses the checkpoint.
        model: names the parameters where an optimizer is given as `optimizer.state_dict()`. State that such an
            optimizer lacks, as before its first step, is made; give the result to `optimizer.load_state_dict`. Of a
            model of FSDP2, parameters that a forward pass has gathered are freed, as they would be stale.
        strict: refuse names that either side lacks. If not, they are logged, and what the checkpoint lacks keeps its
            value.

    Returns:
        `{"iteration": ...}`, with `missing_keys` and `unexpected_keys`: stored names, and JSON Pointers to values.

    Raises:
        TrainerError: if the checkpoint is damaged, or does not fit; values are replaced only after all tensors are
            filled on every rank.
    """
    channel, nonce = open_channel(process_group, coordinator_rank=coordinator_rank)
    problem, tree, held = None, None, None
    try:
        require_path(path)
        if model is not None:
            free_gathered_parameters(model)
        tree = take_apart(state_dict, model=model)
        tree.require_lists()
        held = hold(tree)
    except TrainerError as error:
        problem = error
    channel.agree("given", problem)
    assert tree is not None
    assert held is not None
    known = known_tables("load", channel)
    joint, _ = agree_on_state(channel, "load", held.table(tree, ()), NestedValues(), known)
    filling = Filling(tree, held.shared(joint, channel.rank), joint, model=model, strict=strict)
    restorer = Restorer(channel, nonce=nonce)
    restored = restorer.restore(LoadSource(Path(path)), check=_check, live=filling.live)
    return filling.finish(restored.checkpoint, is_first=channel.coordinates)


def contents_of_state_dict(
    channel: StoreChannel,
    key: str,
    state_dict: dict[str, Any],
    *,
    known: KnownTables,
    folder: str | Path,
    iteration: int,
    from_rank0: Sequence[str] = (),
    model: nn.Module | None = None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    problem: TrainerError | None = None,
) -> Contents:
    """Return what is saved of a state dict. A call of all ranks.

    Args:
        key: of the messages, new on this channel.
        known: what the ranks know of each other.
        optimizers: those whose steps change the tensors.
        problem: why this rank cannot save, if it knows a reason already.

    Raises:
        TrainerError: on every rank, if one of them cannot save, or what they give does not fit together.
    """
    tree, held, values = None, None, NestedValues()
    try:
        check_target(folder, iteration)
        check_patterns(from_rank0)
        tree = take_apart(state_dict, model=model)
        held, values = hold(tree), values_of(tree)
        values.to_bytes()
    except TrainerError as error:
        problem = problem or error
    channel.agree(f"{key}/given", problem)
    assert tree is not None
    assert held is not None
    joint, values = agree_on_state(channel, key, held.table(tree, from_rank0), values, known)
    require_whole(joint)
    require_patterns(from_rank0, joint)
    live = held.shared(joint, channel.rank, from_rank0)
    return Contents(joint.specs, live, joint.aliases, {STATE: values.document(iteration)}, tuple(optimizers))


def known_tables(kind: str, channel: StoreChannel) -> KnownTables:
    """Return what the ranks of a group know of each other from the calls before."""
    return _known.setdefault((kind, channel.ranks), KnownTables())


def _check(checkpoint: object) -> None:
    read_values(checkpoint)  # type: ignore[arg-type]
