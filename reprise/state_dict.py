"""Saving and loading nested state dicts: any tensors and values, on any group of ranks, each with keys of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from reprise.format.layout import DEFAULT_FILE_BYTES
from reprise.nested.calls import fill, save_now
from reprise.nested.loaded import LoadedState, Strictness
from reprise.nested.tree import Tree, tree_of_dict
from reprise.ranks.group import CALL_TIMEOUT_S, open_call
from reprise.tensors.live import free_gathered_parameters


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
        strict: as for `load`.
        missing_ok: as for `load`.
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
        return fill(call, path, make_tree, strict=strict, missing_ok=missing_ok)
