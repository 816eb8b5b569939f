"""Saves and loads outside our trainer: a model and its optimizer, or a nested state dict on any process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from reprise.format.layout import DEFAULT_FILE_BYTES
from reprise.nested.calls import fill, save_now
from reprise.nested.loaded import LoadedState, Strictness
from reprise.nested.tree import LoadedRandomState, tree_of, tree_of_dict
from reprise.ranks.group import CALL_TIMEOUT_S, open_call


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    iteration: int,
    state: Mapping[str, object] | None = None,
    per_rank: Mapping[str, object] | None = None,
    rng: bool = False,
    files: Mapping[str, object] | None = None,
    max_checkpoint_keep: int = 0,
    file_bytes: int = DEFAULT_FILE_BYTES,
    from_rank0: Sequence[str] = (),
    overwrite: bool = True,
    timeout_s: float = CALL_TIMEOUT_S,
) -> Path:
    """Save a model and its optimizer as `folder/iter_<iteration>`, and return this path.

    Every rank in the default process group calls it. Tensors may be plain (replicated on all ranks) or DTensors (FSDP2,
    tensor parallelism). The folder holds whole tensors under the parameter names, whatever the topology. Use
    `save_state_dict` if ranks hold different tensors, such as pipeline stages, or to save with another process group.

    Args:
        folder: The checkpoint folder, on a mounted file system. The save adds `iter_<iteration>` to it.
        optimizer: The optimizer to save. None saves the model alone.
        iteration: The iteration number, 0 or more.
        state: Values, tensors, and objects with `state_dict()` and `load_state_dict()`, equal on all ranks.
        per_rank: Like `state`, but with different content on each rank, such as a sampler position.
        rng: Whether to save each rank's random state: Python, NumPy, torch and its devices.
        files: Files for other programs, by name: bytes, text, a path to copy, or a dict or list to write as JSON.
        max_checkpoint_keep: How many newest checkpoints to keep in `folder`. 0 keeps all.
        file_bytes: The largest tensor file in bytes. A larger tensor gets its own file.
        overwrite: Whether the iteration may already exist. The existing folder is kept as `iter_....superseded-k`.
        from_rank0: Shell patterns for tensors whose values differ between ranks by design, such as DDP's BatchNorm
            statistics (`["*.running_*", "*.num_batches_tracked"]`). Rank 0's values are saved. All other tensors must
            be bitwise equal on all their ranks.
        timeout_s: Seconds to wait for other ranks to make this call.

    Raises:
        ConfigError: On this rank, `folder` is a URL, or a number or pattern is invalid. Other ranks raise
            CheckpointError.
        ReplicaError: A tensor's bits differ between ranks. Rank 0 raises this, other ranks raise CheckpointError.
        TrainerError: The ranks pass different models, optimizers, iterations or `state`, or the checkpoint could not be
            written. Committed checkpoints are untouched.
    """
    with open_call(f"save(iteration={iteration})", timeout_s=timeout_s) as call:
        rank = call.channel.rank
        return save_now(
            folder,
            call,
            lambda: tree_of(model, optimizer, state, rank=rank, per_rank=per_rank, rng=rng, files=files),
            iteration=iteration,
            keep=max_checkpoint_keep,
            file_bytes=file_bytes,
            from_rank0=from_rank0,
            overwrite=overwrite,
        )


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    state: Mapping[str, object] | None = None,
    per_rank: Mapping[str, object] | None = None,
    rng: LoadedRandomState = None,
    strict: Strictness = True,
    iteration: int | None = None,
    missing_ok: bool = False,
    timeout_s: float = CALL_TIMEOUT_S,
) -> LoadedState:
    """Fill a model and its optimizer in place from an iteration folder, or a run folder's newest valid checkpoint.

    Optimizer state is matched by parameter name and created where the optimizer has none yet. Each parameter group's
    hyperparameters (learning rate, weight decay, ...) come from the saved group with the same parameters. Modules
    receive their `get_extra_state` values back.

    Args:
        path: An iteration folder, or a folder with checkpoints. It may be a store URL.
        state: What to fill: objects receive their state through `load_state_dict()`, tensors are filled, and values are
            replaced in their dict. Saved `state` values missing here are returned. An empty dict receives them too.
        per_rank: What to fill with this rank's own values. Load on as many ranks as saved them.
        rng: Whether to restore this rank's random state. True requires as many ranks as saved theirs. On a different
            rank count, `"if_same_ranks"` logs it and keeps the program's own seed. A log line lists unrequested state
            in the checkpoint. Passing False, or an empty `state` or `per_rank`, silences it.
        strict: True refuses names missing on either side, `"missing"` those missing in the checkpoint, False none.
            Allowed names are logged, and values missing in the checkpoint stay.
        iteration: The iteration to load from a run's folder. None loads the newest valid checkpoint.
        missing_ok: Whether a missing folder or checkpoint fills nothing, and returns `state` with iteration 0.
        timeout_s: Seconds to wait for other ranks to make this call.

    Returns:
        A dict with the `state` passed to `save`, and `iteration`. Its `missing_keys` and `unexpected_keys` list the
        missing names allowed by `strict`. Its tensors are on the CPU. Modules, optimizers and DTensors not passed are
        left out.

    Raises:
        TrainerError: The checkpoint is damaged, a tensor has another shape or dtype, the saved optimizer has another
            class, or `strict` refuses a name.
    """
    with open_call("load()", timeout_s=timeout_s) as call:
        rank = call.channel.rank
        return fill(
            call,
            path,
            lambda: tree_of(model, optimizer, state, rank=rank, per_rank=per_rank, rng=rng, is_load=True),
            strict=strict,
            iteration=iteration,
            missing_ok=missing_ok,
        )


def save_state_dict(
    folder: str | Path,
    state_dict: dict[str, Any],
    *,
    iteration: int,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    max_checkpoint_keep: int = 0,
    file_bytes: int = DEFAULT_FILE_BYTES,
    from_rank0: Sequence[str] = (),
    overwrite: bool = True,
    model: nn.Module | None = None,
    files: Mapping[str, object] | None = None,
    timeout_s: float = CALL_TIMEOUT_S,
) -> Path:
    """Save a nested state dict as `folder/iter_<iteration>`, and return this path. All ranks in the group call it.

    Dicts and lists hold tensors, DTensors and plain Python values. Each rank passes its own keys: a tensor or value
    passed under the same name by several ranks must be bitwise equal, and a pipeline stage passes only its own tensors.
    Pass optimizers in the form returned by `get_optimizer_state_dict` from `torch.distributed.checkpoint.state_dict`.
    Tensors under `"model"` become the folder's weights. If they have transformers' names, transformers can open the
    folder.

    Args:
        folder: The checkpoint folder, on a mounted file system. The save adds `iter_<iteration>` to it.
        state_dict: The nested state dict. Each key becomes part of a stored name.
        iteration: The iteration number, 0 or more.
        process_group: The saving ranks. None saves with all ranks. Other ranks are not involved and go on.
        coordinator_rank: The global rank to lock the folder, decide and rename.
        max_checkpoint_keep: How many newest checkpoints to keep in `folder`. 0 keeps all.
        file_bytes: The largest tensor file in bytes. A larger tensor gets its own file.
        overwrite: Whether the iteration may already exist. The existing folder is kept as `iter_....superseded-k`.
        from_rank0: Shell patterns for stored names whose tensors differ between ranks by design, such as
            `["*.running_*"]`. The lowest rank with such a tensor saves it.
        model: Names the parameters if you pass `optimizer.state_dict()`, which numbers them.
        files: See `save`.
        timeout_s: Seconds to wait for other ranks to make this call.

    Raises:
        ConfigError: `folder` is a URL, a number or pattern is invalid, or the rank or coordinator is outside the group.
        ReplicaError: A tensor's bits differ between ranks. The coordinator raises this, other ranks raise
            CheckpointError.
        TrainerError: A value cannot be stored, or the ranks disagree. Committed checkpoints are untouched.
    """
    with open_call(
        f"save_state_dict(iteration={iteration})",
        timeout_s=timeout_s,
        process_group=process_group,
        coordinator_rank=coordinator_rank,
    ) as call:
        return save_now(
            folder,
            call,
            lambda: tree_of_dict(state_dict, model=model, files=files),
            iteration=iteration,
            keep=max_checkpoint_keep,
            file_bytes=file_bytes,
            from_rank0=from_rank0,
            overwrite=overwrite,
        )


def load_state_dict(
    path: str | Path,
    state_dict: dict[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    model: nn.Module | None = None,
    strict: Strictness = True,
    iteration: int | None = None,
    missing_ok: bool = False,
    timeout_s: float = CALL_TIMEOUT_S,
) -> LoadedState:
    """Fill a nested state dict in place from an iteration folder, or a run folder's newest valid checkpoint.

    Tensors are filled, and values are replaced in their dicts and lists. The topology and the division of keys among
    ranks may differ from the save. Only outermost keys passed by some rank are loaded. The checkpoint's other keys are
    ignored.

    Args:
        path: An iteration folder, or a folder with checkpoints. It may be a store URL.
        state_dict: The nested state dict to fill.
        process_group: See `save_state_dict`.
        coordinator_rank: The global rank to choose the checkpoint.
        model: Names the parameters if you pass `optimizer.state_dict()`. Missing state, as before the optimizer's first
            step, is created: pass the filled dict to `optimizer.load_state_dict`. FSDP2 parameters gathered by a
            forward pass are freed, because they would be stale.
        strict: See `load`, also for `iteration` and `missing_ok`.
        timeout_s: Seconds to wait for other ranks to make this call.

    Returns:
        A dict with `iteration`, and the attributes `missing_keys` and `unexpected_keys`: stored names, and JSON
        Pointers for values.

    Raises:
        TrainerError: The checkpoint is damaged or does not fit. Values are replaced only after every rank has filled
            all its tensors.
    """
    with open_call(
        "load_state_dict()",
        timeout_s=timeout_s,
        process_group=process_group,
        coordinator_rank=coordinator_rank,
    ) as call:
        return fill(
            call,
            path,
            lambda: tree_of_dict(state_dict, model=model, is_load=True),
            strict=strict,
            iteration=iteration,
            missing_ok=missing_ok,
        )
