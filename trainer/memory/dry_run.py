"""Computes parameters and memory for every rank in a launch, on a single machine.

Stages are built on the `meta` device under torch's fake process group, without memory or communication.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist

from models.adapters import saved_tensors
from models.config import Stage
from models.families import parameter_count
from models.network import Model
from reprise.errors import count_of
from reprise.format import Box, build_layout
from reprise.tensors import Grid, placed_box
from reprise.torch_private import FakeStore
from trainer.compare.text_table import format_table
from trainer.config.derived import batch_schedule_of, lanes_of, reduces_lanes_over_ranks, topology_of
from trainer.config.frozen import frozen_names
from trainer.config.schema import Config
from trainer.optim.adamw import stored_names
from trainer.optim.table import state_tensors
from trainer.parallel.mesh import build_mesh, stage_grid
from trainer.parallel.pipeline import stages_of
from trainer.parallel.topology import Topology
from trainer.run.parallelize import build_stage, compute_dtype, gathered_dtypes
from trainer.run.state import checkpoint_specs

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class RankMemory:
    """A rank's memory, in elements and bytes.

    Args:
        parameters: Local parameter elements.
        state_bytes: Parameters and moments at rest.
        working_bytes: Gathered parameters and gradients at an iteration's peak.
        activation_bytes: Estimated activations kept for the backward passes in flight.
    """

    parameters: int
    state_bytes: int
    working_bytes: int
    activation_bytes: int


@dataclass(frozen=True, slots=True)
class Simulated:
    """A pipeline rank's stages, built on `meta` for the first rank in `grid`."""

    pp: int
    parts: Sequence[Model]
    grid: Grid


def report(config: Config, world_size: int) -> str:
    """Return a table with a row per pipeline and tensor-parallel rank.

    Its figures are those of the first data-parallel rank: shards follow `torch.chunk`, so it holds the most.
    """
    topology = topology_of(config, world_size)
    rows = list(simulated_memory(config, topology))
    header = ("pp", "tp", "layers", "parameters", "state", "working", "activations", "memory")
    table = format_table([header, *(_cells(*row) for row in rows)], align=">><>>>>>")
    lines = [_headline(config, topology), "", *table]
    if topology.pp > 1 and config.parallel.zero_stage >= 2 and topology.dp > 1:
        lines += [
            "",
            f"zero_stage={config.parallel.zero_stage} with a pipeline: torch's schedules keep a stage's parameters and "
            "gradients unsharded during an iteration, as stage 1 does; the state between iterations is sharded.",
        ]
    return "\n".join(lines)


def simulate(config: Config, topology: Topology) -> Iterator[Simulated]:
    """Yield every pipeline rank's stages.

    This process must not be in a process group. A fake group exists while the generator runs.
    """
    inner = replace(topology, pp=1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=inner.world_size)
    try:
        mesh = build_mesh(inner, "cpu")
        for pp in range(topology.pp):
            stages = stages_of(config.model.n_layer, pp=topology.pp, vpp=topology.vpp, rank=pp)
            parts = [build_stage(config, stage=stage, topology=inner, mesh=mesh) for stage in stages]
            yield Simulated(pp, parts, stage_grid(topology, pp))
    finally:
        dist.destroy_process_group()


def simulated_memory(config: Config, topology: Topology) -> Iterator[tuple[Simulated, int, RankMemory]]:
    """Yield each pipeline rank's stages, a tensor-parallel rank, and its memory on the first data-parallel rank."""
    for simulated in simulate(config, topology):
        for tp in range(topology.tp):
            yield simulated, tp, _memory(config, simulated, topology, tp=tp)


def _memory(config: Config, simulated: Simulated, topology: Topology, *, tp: int) -> RankMemory:
    parts, train = simulated.parts, config.train
    boxes_of_parts = [boxes_at(part, simulated.grid, tp=tp) for part in parts]
    frozen, averages = frozen_names(config.model, train.freeze), train.ema_decay > 0
    itemsizes = Counter[str]()
    for tensor in state_tensors(config.optimizer, config.model, frozen, averages=averages):
        itemsizes[tensor.parameter] += tensor.dtype.itemsize if tensor.stored.shape else 0
    return RankMemory(
        sum(box.numel for boxes in boxes_of_parts for box in boxes.values()),
        sum(box.numel * (4 + itemsizes[name]) for boxes in boxes_of_parts for name, box in boxes.items()),
        _working_bytes(config, parts, topology, boxes_of_parts=boxes_of_parts),
        _activation_bytes(config, parts, topology),
    )


def boxes_at(part: Model, grid: Grid, *, tp: int) -> dict[str, Box]:
    """Return each parameter's box in a part on a tensor-parallel rank, the first over dp."""
    return {name: placed_box(name, p, grid, {"dp": 0, "tp": tp})[0] for p, name in stored_names(part).items()}


def _working_bytes(
    config: Config, parts: Sequence[Model], topology: Topology, *, boxes_of_parts: Sequence[dict[str, Box]]
) -> int:
    """Return the bytes in gathered parameters (compute dtype) and gradients (float32), at their peak.

    ZeRO stage 3 without a pipeline gathers a block at a time, two with prefetch, and keeps gradients sharded. Otherwise
    a pipeline stage's parameters are unsharded. So are its gradients, except with ZeRO stage 2 without a pipeline.
    Frozen parameters have no gradients.

    Args:
        boxes_of_parts: Each part's boxes.
    """
    parameters = sum(box.numel for boxes in boxes_of_parts for box in boxes.values())
    trained = sum(
        boxes[name].numel for part, boxes in zip(parts, boxes_of_parts, strict=True) for name, _ in _trained(part)
    )
    stage, itemsize = config.parallel.zero_stage, compute_dtype(config).itemsize
    lanes = _lane_bytes(config, parts, topology, trained=trained)
    if topology.dp == 1 or stage == 0:
        return trained * 4 + parameters * (itemsize if itemsize < 4 else 0) + lanes
    block_bytes, rest_bytes = (dtype.itemsize for dtype in gathered_dtypes(config, topology))
    blocks = [
        sum(p.numel() for p in block.parameters()) // topology.tp for part in parts for block in part.blocks.values()
    ]
    whole_parameters = sum(p.numel() for part in parts for p in part.parameters()) // topology.tp
    gathered = sum(blocks) * block_bytes + (whole_parameters - sum(blocks)) * rest_bytes
    if stage == 3 and topology.pp == 1:
        gathered = 2 * max(blocks) * block_bytes
    gradients = trained if stage >= 2 and topology.pp == 1 else _unsharded_gradients(parts, topology)
    return gathered + gradients * 4 + lanes


def _lane_bytes(config: Config, parts: Sequence[Model], topology: Topology, *, trained: int) -> int:
    """Estimate the bytes added by `parallel.invariant_ranks`: lane sums waiting for the next lane.

    With 2^n lanes on a rank at most n sums wait. They are sharded if every lane is reduced over ranks, beside the
    gradients of a lane with several micro-batches.

    Args:
        trained: Elements in this rank's trained parameters.
    """
    lanes = lanes_of(config)
    if lanes is None:
        return 0
    waiting, unsharded = (lanes.count // topology.dp).bit_length() - 1, _unsharded_gradients(parts, topology)
    if not reduces_lanes_over_ranks(config, topology):
        return 4 * waiting * unsharded
    return 4 * (waiting * trained + (unsharded if lanes.length > 1 else 0))


def _trained(part: Model) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, parameter) for parameter, name in stored_names(part).items() if parameter.requires_grad]


def _unsharded_gradients(parts: Sequence[Model], topology: Topology) -> int:
    """Count the elements in a rank's trained parameters before ZeRO shards them."""
    return sum(p.numel() for part in parts for _, p in _trained(part)) // topology.tp


def _activation_bytes(config: Config, parts: Sequence[Model], topology: Topology) -> int:
    """Estimate kept activations: 34 bytes per position, channel and layer in two-byte formats.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models". Equation 1 without
    its attention matrix, which fused kernels do not keep; equation 4 for sequence parallelism (tensor parallelism alone
    leaves 10 bytes unsharded). With activation checkpointing, only a block's 2-byte input.
    """
    train = config.train
    scale = compute_dtype(config).itemsize / 2
    positions = train.micro_batch_size * train.seq_length * config.model.n_embd * scale
    cut = topology.tp if topology.sp else 1
    per_layer = 2 / cut if train.activation_checkpointing else 10 / cut + 24 / topology.tp
    in_flight = min(topology.pp, max(batch_schedule_of(train).sizes) // (train.micro_batch_size * topology.dp))
    layers = sum(len(part.stage.layers) for part in parts)
    logits = train.micro_batch_size * train.seq_length * config.model.padded_vocab_size * 4 // topology.tp
    return int(positions * per_layer * layers * in_flight) + (logits if parts[-1].stage.last else 0)


def _headline(config: Config, topology: Topology) -> str:
    frozen, averages = frozen_names(config.model, config.train.freeze), config.train.ema_decay > 0
    layout = build_layout(list(checkpoint_specs(config.model, config.optimizer, frozen, averages=averages)))
    sizes = f"tp {topology.tp}, pp {topology.pp}, vpp {topology.vpp}, dp {topology.dp}"
    copies = f", replicate {topology.replicate}" if topology.replicate > 1 else ""
    return (
        f"{parameter_count(config.model):,} parameters{_trained_share(config)} on "
        f"{count_of(topology.world_size, 'rank', form=',')} "
        f"({sizes}, zero_stage {config.parallel.zero_stage}{copies}); a checkpoint has {layout.total_bytes:,} bytes"
    )


def _trained_share(config: Config) -> str:
    """Describe how many parameters are trained. Empty if all are."""
    frozen = frozen_names(config.model, config.train.freeze)
    trained = [tensor for name, tensor in saved_tensors(config.model).items() if name not in frozen]
    count = sum(prod(tensor.shape) for tensor in trained)
    if config.model.is_adapted:
        return f", frozen beneath adapters of {count:,} parameters,"
    return f", {count:,} of them trained," if frozen else ""


def _cells(simulated: Simulated, tp: int, memory: RankMemory) -> list[str]:
    layers = " ".join(_span(part.stage) for part in simulated.parts)
    sizes = (memory.state_bytes, memory.working_bytes, memory.activation_bytes)
    cells = [f"{size / _GIB:.2f} GiB" for size in (*sizes, sum(sizes))]
    return [str(simulated.pp), str(tp), layers, f"{memory.parameters:,}", *cells]


def _span(stage: Stage) -> str:
    return f"{stage.layers[0]}-{stage.layers[-1]}" if len(stage.layers) else "none"
