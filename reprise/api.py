"""Saving and loading any torch model and optimizer in two calls, outside our trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from reprise.format.layout import DEFAULT_FILE_BYTES
from reprise.loading.reader import Checkpoint
from reprise.nested.calls import fill, save_now
from reprise.nested.loaded import LoadedState, Strictness
from reprise.nested.optimizers import check_optimizer
from reprise.nested.own_state import check_ranks, own_state
from reprise.nested.tree import Tree, tree_of
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

        def make_tree() -> Tree:
            state_of_rank = own_state(call.channel.rank, per_rank, rng=rng)
            return tree_of(model, optimizer, state, of_rank=state_of_rank, files=files)

        return save_now(
            folder,
            call,
            make_tree,
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
    rng: bool | None = None,
    strict: Strictness = True,
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
        rng: set the saved random state of this rank, on as many ranks as saved theirs. What the checkpoint has and the
            call does not take is logged; False, and an empty `state` or `per_rank`, says that this is meant.
        strict: True refuses names missing on either side, `"missing"` those missing in the checkpoint, `"model"` those
            of modules on either side, and False none. Other names are logged, and values missing in the checkpoint are
            kept.
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
            state_of_rank = own_state(call.channel.rank, per_rank, rng=rng)
            tree = tree_of(model, optimizer, values, of_rank=state_of_rank, is_load=True)
            tree.takes_rest = True
            arguments = {"state": state, "per_rank": per_rank, "rng": rng}
            tree.declined = [name for name, value in arguments.items() if value is not None and not value]
            return tree

        def check(checkpoint: Checkpoint) -> None:
            if optimizer is not None:
                check_optimizer(checkpoint, optimizer)
            if rng or per_rank:
                check_ranks(checkpoint, call.channel.world_size)

        result = fill(call, path, make_tree, strict=strict, missing_ok=missing_ok, check=check)
    return LoadedState({**values, **result}, result.missing_keys, result.unexpected_keys)
