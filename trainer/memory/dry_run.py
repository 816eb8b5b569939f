"""Computes parameters and memory for every rank in a launch, on a single machine.

Stages are built on the `meta` device under torch's fake process group, without memory or communication.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from models.families import parameter_count
from models.network import Model
from reprise.errors import count_of
from reprise.format import TensorKind, build_layout
from reprise.tensors import Grid, placed_box
from reprise.torch_private import FakeStore
from trainer.compare.text_table import format_table
from trainer.config.schema import Config
from trainer.optim.adamw import stored_names
from trainer.optim.table import state_tensors
from trainer.parallel.mesh import build_mesh, stage_grid
from trainer.parallel.pipeline import stages_of
from trainer.parallel.topology import Topology
from trainer.run.parallelize import build_stage, compute_dtype, gathered_dtypes
from trainer.run.state import checkpoint_specs

_GIB = 1 << 30


class RankMemory(NamedTuple):
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
    topology = config.parallel.topology(world_size)
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
    train, itemsizes = config.train, Counter[str]()
    frozen, averages = config.frozen, train.ema_decay > 0
    for tensor in state_tensors(config.optimizer, config.model, frozen, averages=averages):
        itemsizes[tensor.parameter] += tensor.dtype.itemsize if tensor.stored.shape else 0
    for simulated in simulate(config, topology):
        for tp in range(topology.tp):
            parameters = [
                _RankParameter(name, placed_box(name, p, simulated.grid, {"dp": 0, "tp": tp})[0].numel, p)
                for part in simulated.parts
                for p, name in stored_names(part).items()
            ]
            memory = RankMemory(
                sum(parameter.size for parameter in parameters),
                sum(parameter.size * (4 + itemsizes[parameter.name]) for parameter in parameters),
                _working_bytes(config, simulated.parts, topology, parameters),
                _activation_bytes(config, simulated.parts, topology),
            )
            yield simulated, tp, memory


class _RankParameter(NamedTuple):
    """A parameter, and how many of its elements a rank holds between iterations."""

    name: str
    size: int
    parameter: torch.nn.Parameter


def _working_bytes(
    config: Config, parts: Sequence[Model], topology: Topology, parameters: Sequence[_RankParameter]
) -> int:
    """Return the bytes in gathered parameters (compute dtype) and gradients (float32), at their peak.

    ZeRO stage 3 without a pipeline gathers a block at a time, two with prefetch, and keeps gradients sharded. Otherwise
    a pipeline stage's parameters are unsharded. So are its gradients, except with ZeRO stage 2 without a pipeline.
    Frozen parameters have no gradients.

    With `parallel.invariant_ranks`, lane sums wait for the next lane: at most n with 2^n lanes on a rank. They are
    sharded if every lane is reduced over ranks, beside the gradients of a lane with several micro-batches.
    """
    trained = [part for part in parameters if part.parameter.requires_grad]
    unsharded = sum(part.parameter.numel() for part in trained) // topology.tp
    is_sharded, lanes = config.parallel.reduces_lanes_over_ranks(topology), config.lanes
    gradients = sum(part.size for part in trained) if is_sharded else unsharded
    if lanes is not None:
        gradients *= (lanes.count // topology.dp).bit_length()
        gradients += unsharded if is_sharded and lanes.length > 1 else 0
    stage, itemsize = config.parallel.zero_stage, compute_dtype(config).itemsize
    if topology.dp == 1 or stage == 0:
        return gradients * 4 + sum(part.size for part in parameters) * (itemsize if itemsize < 4 else 0)
    block_bytes, rest_bytes = (dtype.itemsize for dtype in gathered_dtypes(config, topology))
    blocks = [
        sum(p.numel() for p in block.parameters()) // topology.tp for part in parts for block in part.blocks.values()
    ]
    other_count = sum(part.parameter.numel() for part in parameters) // topology.tp - sum(blocks)
    gathered = sum(blocks) * block_bytes + other_count * rest_bytes
    if stage == 3 and topology.pp == 1:
        gathered = 2 * max(blocks) * block_bytes
    return gradients * 4 + gathered


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
    in_flight = min(topology.pp, max(train.batch_sizes.sizes) // (train.micro_batch_size * topology.dp))
    layers = sum(len(part.stage.layers) for part in parts)
    logits = train.micro_batch_size * train.seq_length * config.model.padded_vocab_size * 4 // topology.tp
    return int(positions * per_layer * layers * in_flight) + (logits if parts[-1].stage.last else 0)


def _headline(config: Config, topology: Topology) -> str:
    frozen, averages = config.frozen, config.train.ema_decay > 0
    specs = list(checkpoint_specs(config.model, config.optimizer, frozen, averages=averages))
    weights = (spec for spec in specs if spec.kind is not TensorKind.OPTIMIZER and spec.name not in frozen)
    count, share = sum(prod(spec.shape) for spec in weights), ""
    if frozen:
        is_adapted = config.model.is_adapted
        share = f", frozen beneath adapters of {count:,} parameters," if is_adapted else f", {count:,} of them trained,"
    sizes = f"tp {topology.tp}, pp {topology.pp}, vpp {topology.vpp}, dp {topology.dp}"
    copies = f", replicate {topology.replicate}" if topology.replicate > 1 else ""
    return (
        f"{parameter_count(config.model):,} parameters{share} on {count_of(topology.world_size, 'rank', form=',')} "
        f"({sizes}, zero_stage {config.parallel.zero_stage}{copies}); "
        f"a checkpoint has {build_layout(specs).total_bytes:,} bytes"
    )


def _cells(simulated: Simulated, tp: int, memory: RankMemory) -> list[str]:
    spans = [part.stage.layers for part in simulated.parts]
    layers = " ".join(f"{span[0]}-{span[-1]}" if span else "none" for span in spans)
    parameters, *sizes = memory
    cells = [f"{size / _GIB:.2f} GiB" for size in (*sizes, sum(sizes))]
    return [str(simulated.pp), str(tp), layers, f"{parameters:,}", *cells]
