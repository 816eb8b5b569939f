"""Writes a named state into files as DeepSpeed lays it out, without DeepSpeed. Real files are held against it.

Sources: `_save_checkpoint` of DeepSpeed's `runtime/engine.py`, `state_dict` of `runtime/zero/stage_1_and_2.py` and
`stage3.py`.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.families import aliases, stored_tensors
from trainer.interop.source import StateSource

VERSION = "0.19.8"
MOMENTS = ("exp_avg", "exp_avg_sq")
# Classes of DeepSpeed whose objects lie in its files.
_CLASSES = (("deepspeed.runtime.fp16.loss_scaler", "LossScaler"), ("deepspeed.runtime.zero.config", "ZeroStageEnum"))


@dataclass(frozen=True)
class State:
    """A model and Adam's state by name, float32: weights, and moments of what is not frozen."""

    weights: Mapping[str, Tensor]
    moments: Mapping[str, Mapping[str, Tensor]]
    step: float
    iteration: int
    shared: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Way:
    """How DeepSpeed was set to train."""

    stage: int
    ranks: int
    dtype: torch.dtype = torch.float32
    aligns: bool = False
    deals_out: bool = False
    sub_group_size: int = 1 << 30
    is_named: bool = False  # whether the optimizer was made of named parameters


def of_source(source: StateSource) -> State:
    """Return everything of a source."""
    weights = {name: source.read(name) for name in stored_tensors(source.model)}
    moments = {key: {name: source.read(f"{key}.{name}") for name in weights} for key in MOMENTS}
    return State(weights, moments, float(source.iteration), source.iteration, aliases(source.model))


def groups_of(state: State, way: Way) -> list[list[str]]:
    """Return the names of the parameters of each group of the optimizer, in order."""
    names = [name for name in state.weights if name in state.moments["exp_avg"]]
    return [[n for n in names if state.weights[n].dim() > 1], [n for n in names if state.weights[n].dim() < 2]]


def write(folder: Path, state: State, way: Way) -> Path:
    """Write `folder/global_step<iteration>` and `folder/latest`; return the former."""
    tag = folder / f"global_step{state.iteration}"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    groups = groups_of(state, way)
    if way.deals_out:  # round_robin_gradients
        groups = [[name for rank in range(way.ranks) for name in group[rank :: way.ranks]] for group in groups]
    if way.stage == 3:
        groups = [part for group in groups for part in _sub_groups(state, group, way)]
    with deepspeed_classes() as make:
        for rank in range(way.ranks):
            if way.stage:
                optimizer = (_cut_one_by_one if way.stage == 3 else cut_together)(state, groups, way, rank)
                optimizer |= {"zero_stage": make("ZeroStageEnum"), "loss_scaler": make("LossScaler")}
                prefix = "bf16_" if way.dtype is torch.bfloat16 else ""
                torch.save(
                    {"optimizer_state_dict": optimizer, "ds_config": {}, "ds_version": VERSION},
                    tag / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
                )
            if way.stage == 3 or rank == 0:
                prefix = f"zero_pp_rank_{rank}_" if way.stage == 3 else ""
                torch.save(_model_file(state, groups, way, rank), tag / f"{prefix}mp_rank_00_model_states.pt")
    return tag


def _model_file(state: State, groups: Sequence[Sequence[str]], way: Way, rank: int) -> dict[str, Any]:
    trained = {name for group in groups for name in group}
    module = {name: value.to(way.dtype) for name, value in state.weights.items()}
    frozen = {name: value for name, value in module.items() if name not in trained}
    if way.stage == 3:
        fragments = {name: _part(value, way, rank) for name, value in frozen.items()}
        module = {name: torch.empty(0, dtype=way.dtype) for name in module}
    else:
        fragments = frozen
    module |= {name: module[other] for name, other in state.shared.items()}
    shapes = {name: value.shape for name, value in state.weights.items()}
    return {
        "module": OrderedDict(module),
        "buffer_names": [],
        "optimizer": None if way.stage else _whole(state, groups, way),
        "param_shapes": [OrderedDict((n, shapes[n]) for n in group) for group in groups] if way.stage else None,
        "frozen_param_shapes": OrderedDict((n, shapes[n]) for n in frozen) if way.stage > 1 else None,
        "shared_params": (dict(state.shared) if rank == 0 else {}) if way.stage else None,
        "frozen_param_fragments": OrderedDict(fragments) if way.stage > 1 else None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": state.iteration,
        "global_samples": 12 * state.iteration,
        "dp_world_size": way.ranks,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": VERSION,
    }


def cut_together(state: State, groups: Sequence[Sequence[str]], way: Way, rank: int) -> dict[str, Any]:
    """Return the optimizer's state on a rank at ZeRO 1 and 2."""
    every = 16 // way.dtype.itemsize if way.aligns else 1
    paddings = [[-state.weights[n].numel() % every for n in group[:-1]] + [0] for group in groups]
    # nccl_start_alignment_factor = 2
    ends = [
        -sum(state.weights[n].numel() + p for n, p in zip(group, padding, strict=True)) % (2 * way.ranks)
        for group, padding in zip(groups, paddings, strict=True)
    ]

    def flat(values: Mapping[str, Tensor], number: int) -> Tensor:
        pieces = [F.pad(values[n].flatten(), (0, p)) for n, p in zip(groups[number], paddings[number], strict=True)]
        return F.pad(torch.cat(pieces), (0, ends[number])).chunk(way.ranks)[rank].clone()

    masters = [flat(state.weights, number) for number in range(len(groups))]
    # The end's padding may reach over several ranks.
    behind = [(way.ranks - 1 - rank) * master.numel() for master in masters]
    stripped = [
        min(master.numel(), max(0, end - later)) for master, end, later in zip(masters, ends, behind, strict=True)
    ]
    return {
        "dynamic_loss_scale": False,
        "overflow": False,
        "clip_grad": 1.0,
        "base_optimizer_state": _numbered(state, [[f"{n}"] for n in range(len(groups))], lambda n, m: flat(m, int(n))),
        "single_partition_of_fp32_groups": [m[: m.numel() - e] for m, e in zip(masters, stripped, strict=True)],
        "group_paddings": stripped,
        "param_alignment_paddings": paddings,
        "partition_count": [way.ranks] * len(groups),
        "ds_version": VERSION,
        "param_slice_mappings": [],
    }


def _cut_one_by_one(state: State, groups: Sequence[Sequence[str]], way: Way, rank: int) -> dict[str, Any]:
    """Return the optimizer's state on a rank at ZeRO 3."""

    def flat(values: Mapping[str, Tensor], number: int) -> Tensor:
        return torch.cat([_part(values[name], way, rank) for name in groups[number]])

    return {
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": way.ranks,
        "optimizer_state_dict": _numbered(state, [[f"{n}"] for n in range(len(groups))], lambda n, m: flat(m, int(n))),
        "fp32_flat_groups": [flat(state.weights, number) for number in range(len(groups))],
    }


def _whole(state: State, groups: Sequence[Sequence[str]], way: Way) -> dict[str, Any]:
    """Return the optimizer's state at stage 0."""
    numbered = _numbered(state, groups, lambda name, moments: moments[name])
    for table, group in zip(numbered["param_groups"], groups, strict=True):
        table |= {"param_names": list(group)} if way.is_named else {}
    if way.dtype is torch.float32:
        return numbered
    masters = [[state.weights[name] for name in group] for group in groups]
    scale = {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": state.iteration}
    return scale | {"optimizer_state_dict": numbered, "fp32_groups": masters}


def _numbered(
    state: State, groups: Sequence[Sequence[str]], value: Callable[[str, Mapping[str, Tensor]], Tensor]
) -> dict[str, Any]:
    """Return the state as torch's optimizers give it: by number."""
    names = [name for group in groups for name in group]
    moments = [{key: value(name, state.moments[key]) for key in MOMENTS} for name in names]
    ends = [sum(len(group) for group in groups[: n + 1]) for n in range(len(groups))]
    return {
        "state": {number: {"step": torch.tensor(state.step), **entry} for number, entry in enumerate(moments)},
        "param_groups": [
            {"weight_decay": 0.1, "lr": 1e-3, "betas": (0.9, 0.95), "params": list(range(end - len(group), end))}
            for group, end in zip(groups, ends, strict=True)
        ],
    }


def _part(value: Tensor, way: Way, rank: int) -> Tensor:
    size = -(-value.numel() // way.ranks)
    padding = size * way.ranks - value.numel()  # memory as DeepSpeed found it: it may hold anything
    return F.pad(value.flatten(), (0, padding), value=math.nan)[rank * size : (rank + 1) * size].clone()


def _sub_groups(state: State, group: Sequence[str], way: Way) -> Iterator[list[str]]:
    """Cut a group where a rank's parts reach `sub_group_size` elements."""
    part, count = list[str](), 0
    for name in group:
        part.append(name)
        count += -(-state.weights[name].numel() // way.ranks)
        if count >= way.sub_group_size:
            yield part
            part, count = [], 0
    if part:
        yield part


@contextmanager
def deepspeed_classes() -> Iterator[Callable[[str], object]]:
    """Give a maker of objects that are pickled under the names of DeepSpeed's classes; unpickling would import it."""
    made, added = {}, {}
    for module, name in _CLASSES:
        made[name] = type(name, (), {"__module__": module})
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            added.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        setattr(added[module], name, made[name])
    hidden = {name: sys.modules[name] for name in added if name in sys.modules}
    sys.modules.update(added)
    try:
        yield lambda name: made[name]()
    finally:
        for name in added:
            del sys.modules[name]
        sys.modules.update(hidden)
