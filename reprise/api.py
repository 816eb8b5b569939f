"""Saving and loading outside our trainer: a model and its optimizer, or a nested state dict on any group of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from reprise.format.layout import DEFAULT_FILE_BYTES
from reprise.loading.reader import Checkpoint
from reprise.nested.calls import fill, save_now
from reprise.nested.documents import check_ranks
from reprise.nested.loaded import LoadedState, Strictness
from reprise.nested.optimizers import check_optimizer
from reprise.nested.tree import LoadedRandomState, Tree, declined, tree_of, tree_of_dict
from reprise.ranks.group import CALL_TIMEOUT_S, open_call
from reprise.tensors.live import free_gathered_parameters


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

    To be called by all ranks of the default process group; tensors may be plain (replicated on all ranks) or DTensors
    (FSDP2, tensor parallelism). The folder holds whole tensors under the parameters' names, whatever the topology.
    `save_state_dict` saves ranks with different tensors, such as the stages of a pipeline, and groups of ranks.

    Args:
        state: values, tensors, and objects with `state_dict()` and `load_state_dict()`, the same on all ranks.
        per_rank: the same, where each rank has its own, such as the position of a sampler.
        rng: save each rank's random state: Python, numpy, torch and its devices.
        files: files for other programs, by name: bytes, text, a path to copy, or a dict or list to write as JSON.
        max_checkpoint_keep: number of newest checkpoints kept in `folder`; 0 keeps all.
        file_bytes: the size in bytes at which a file is full.
        overwrite: whether the iteration may be there already; it is kept as `iter_....superseded-k`.
        from_rank0: shell patterns for the names of tensors with differences between ranks by design, such as the
            BatchNorm statistics of DDP (`["*.running_*", "*.num_batches_tracked"]`). Rank 0's are saved. All other
            tensors must be equal bit for bit on all their ranks.
        timeout_s: seconds to wait for ranks that have not made this call.

    Raises:
        ConfigError: on a rank whose `folder` is a URL, or whose number or patterns are invalid; on the others it is a
            CheckpointError.
        ReplicaError: on rank 0, if the bits of a tensor differ between ranks; on the others it is a CheckpointError.
        TrainerError: if the ranks give different models, optimizers, iterations or `state`, or the checkpoint could not
            be written; committed checkpoints are untouched.
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
            is_replicated=True,
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
    """Fill a model and its optimizer in place from an iteration folder, or the newest valid one of a run's folder.

    Optimizer state is found by parameter name, made where the optimizer has none yet, and the numbers of each parameter
    group (learning rate, decay ...) are set from the group of the same parameters. A module takes back its value of
    `get_extra_state`.

    Args:
        state: what to fill: an object with `load_state_dict()` takes its state, tensors are filled, and values are
            replaced in their dict. Saved values of `state` absent from it come back in the result.
        per_rank: what to fill with this rank's own values, on as many ranks as saved them.
        rng: set the saved random state of this rank, on as many ranks as saved theirs; on others, `"if_same_ranks"`
            leaves it, logs that, and draws go on from the program's own seed. What the checkpoint has and the call does
            not take is logged; False, and an empty `state` or `per_rank`, says that this is meant.
        strict: True refuses names missing on either side, `"missing"` those missing in the checkpoint, `"model"` those
            of modules on either side, and False none. Other names are logged, and values missing in the checkpoint are
            kept.
        iteration: the iteration in a run's folder, in place of the newest valid one.
        missing_ok: return `state` and iteration 0, and fill nothing, where the folder is missing or has no checkpoint.
        timeout_s: seconds to wait for ranks that have not made this call.

    Returns:
        The `state` given to `save`, and `iteration`: a dict, whose `missing_keys` and `unexpected_keys` list the names
        missing on a side, where `strict` does not refuse them. Tensors in it are on the CPU; modules, optimizers and
        DTensors absent from the call are left out.

    Raises:
        TrainerError: if the checkpoint is damaged, has a tensor of another shape or dtype, or was saved with an
            optimizer of another class, or if `strict` refuses a name.
    """
    values = state if isinstance(state, dict) else dict(state or {})
    with open_call(f"load(missing_ok={missing_ok})" if missing_ok else "load()", timeout_s=timeout_s) as call:

        def make_tree() -> Tree:
            rank = call.channel.rank
            tree = tree_of(model, optimizer, values, rank=rank, per_rank=per_rank, rng=rng, is_load=True)
            tree.takes_rest = True
            tree.declined = declined({"state": state, "per_rank": per_rank, "rng": rng})
            return tree

        def check(checkpoint: Checkpoint) -> None:
            if optimizer is not None:
                check_optimizer(checkpoint, optimizer)
            if rng is True or per_rank:
                check_ranks(checkpoint, call.channel.world_size)

        result = fill(call, path, make_tree, strict=strict, iteration=iteration, missing_ok=missing_ok, check=check)
    return LoadedState({**values, **result}, result.missing_keys, result.unexpected_keys)


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
    """Save a nested state dict as `folder/iter_<iteration>`, and return this path. A call of all ranks of the group.

    Dicts and lists hold tensors, DTensors and plain values of Python. Each rank gives its keys: a tensor or value given
    under the same name by several ranks must be equal, bit for bit, and a stage of a pipeline gives its own tensors
    only. Optimizers are given as `get_optimizer_state_dict` of `torch.distributed.checkpoint.state_dict` returns them.
    Tensors under `"model"` become the weights of the folder, and transformers opens the folder where the names are its
    own.

    Args:
        process_group: the saving ranks; None for all. The others have no part in it, and go on meanwhile.
        coordinator_rank: the deciding global rank, which takes the lock of the folder and renames.
        max_checkpoint_keep: number of newest checkpoints kept in `folder`; 0 keeps all.
        file_bytes: the size in bytes at which a file is full.
        overwrite: whether the iteration may be there already; it is kept as `iter_....superseded-k`.
        from_rank0: shell patterns for the stored names of tensors with differences between ranks by design, such as
            `["*.running_*"]`; the lowest rank with such a tensor saves it.
        model: names the parameters where an optimizer is given as `optimizer.state_dict()`, with numbers for them.
        files: as for `save`.
        timeout_s: seconds to wait for ranks that have not made this call.

    Raises:
        ConfigError: for a URL as folder, an invalid number or patterns, or a rank or coordinator outside the group.
        ReplicaError: on the coordinator, if the bits of a tensor differ between ranks; a CheckpointError on the others.
        TrainerError: naming an unstorable value, or a difference between ranks; committed checkpoints are untouched.
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
    """Fill a nested state dict in place from an iteration folder, or the newest valid checkpoint of a run's folder.

    Tensors are filled, values are replaced in their dicts and lists, at any topology and under any division of the keys
    among ranks. A load is about the outermost keys given by any rank; others of the checkpoint are left out.

    Args:
        process_group: as for `save_state_dict`.
        coordinator_rank: the global rank with the choice of the checkpoint.
        model: names the parameters where an optimizer is given as `optimizer.state_dict()`. The missing state of such
            an optimizer, as before its first step, is made; give the result to `optimizer.load_state_dict`. Of a model
            of FSDP2, parameters gathered by a forward pass are freed, as they would be stale.
        strict, iteration, missing_ok: as for `load`.
        timeout_s: seconds to wait for ranks that have not made this call.

    Returns:
        A dict with `iteration`, `missing_keys` and `unexpected_keys`; the keys are stored names, and JSON Pointers to
        values.

    Raises:
        TrainerError: if the checkpoint is damaged, or does not fit; values are replaced only after all tensors are
            filled on every rank.
    """

    def make_tree() -> Tree:
        if model is not None:
            free_gathered_parameters(model)
        return tree_of_dict(state_dict, model=model, is_load=True)

    with open_call(
        f"load_state_dict(missing_ok={missing_ok})" if missing_ok else "load_state_dict()",
        timeout_s=timeout_s,
        process_group=process_group,
        coordinator_rank=coordinator_rank,
    ) as call:
        return fill(call, path, make_tree, strict=strict, iteration=iteration, missing_ok=missing_ok)
