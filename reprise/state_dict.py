"""Saving and loading nested state dicts: any tensors and values, on any group of ranks, each with keys of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from reprise.format.layout import DEFAULT_FILE_BYTES
from reprise.group import CALL_TIMEOUT_S, open_call
from reprise.nested.calls import fill, save_now
from reprise.nested.loaded import LoadedState, Strictness
from reprise.nested.module_tree import tree_of_dict
from reprise.nested.tree import Tree
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
    """Save a nested state dict as `folder/iter_<iteration>`, and return that path. A call of all ranks of the group.

    Dicts and lists hold tensors, DTensors and plain values of Python. Each rank gives the keys that it has: what
    several ranks give under one name must be equal, bit for bit, and a stage of a pipeline gives its own tensors only.
    Optimizers are given as `get_optimizer_state_dict` of `torch.distributed.checkpoint.state_dict` returns them.
    Tensors under `"model"` become the weights of the folder, so that transformers opens it where the names are those it
    uses.

    Args:
        process_group: the ranks that save; None for all. The others have no part in it, and go on meanwhile.
        coordinator_rank: the global rank that takes the lock of the folder, decides, and renames.
        max_checkpoint_keep: how many checkpoints stay in `folder`, the newest ones; 0 keeps all.
        file_bytes: the size in bytes at which a file is full.
        overwrite: whether the iteration may be there already; it is kept as `iter_....superseded-k`.
        from_rank0: shell patterns for the stored names of tensors that differ between ranks by design, such as
            `["*.running_*"]`; the lowest rank that holds one saves it.
        model: names the parameters where an optimizer is given as `optimizer.state_dict()`, with numbers for them.
        files: as for `save`.
        timeout_s: seconds to wait for ranks that have not made this call.

    Raises:
        ConfigError: for a folder that is a URL, a number or patterns that are none, or a rank or coordinator outside
            the group.
        ReplicaError: on the coordinator, if ranks hold different bits of one tensor; a CheckpointError on the others.
        TrainerError: naming what cannot be saved, or differs between ranks; nothing that was committed is touched.
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
    """Fill a nested state dict in place from one iteration folder, or the newest valid one of a run's folder.

    Tensors are filled, values are replaced in their dicts and lists, at any topology and under any division of the
    keys among ranks. A load is about the outermost keys that any rank gives; others of the checkpoint are left out.

    Args:
        process_group: as for `save_state_dict`.
        coordinator_rank: the global rank that chooses the checkpoint.
        model: names the parameters where an optimizer is given as `optimizer.state_dict()`. State that such an
            optimizer lacks, as before its first step, is made; give the result to `optimizer.load_state_dict`. Of a
            model of FSDP2, parameters that a forward pass has gathered are freed, as they would be stale.
        strict: refuse names that either side lacks. If not, they are logged, and what the checkpoint lacks keeps its
            value.
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
