"""Builds this rank's pipeline stages and applies tensor, data and pipeline parallelism to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from models import families
from models.build import build_model
from models.config import Stage
from models.layers import token_loss
from models.network import Model
from reprise.format import cut
from reprise.tensors import local_of, with_memory
from trainer.config.schema import Config
from trainer.data.documents import window_form
from trainer.launch.process_group import Cluster
from trainer.memory.needs import require_memory
from trainer.optim.adamw import stored_names
from trainer.optim.exact_sum import NormShare
from trainer.parallel import data, pipeline
from trainer.parallel.context import ParallelContext
from trainer.parallel.invariant import LocalLanes, ShardedLanes
from trainer.parallel.reduction import GradientReduction, MeanReduction
from trainer.parallel.topology import Topology
from trainer.run.state import TrainerState

if TYPE_CHECKING:
    from trainer.parallel.shard_sums import Shards


def build_models(config: Config, cluster: Cluster, *, topology: Topology, mesh: DeviceMesh | None) -> list[Model]:
    """Build this rank's stages with zero-filled parameters.

    Each stage is built on `meta` and sharded before memory is allocated, so only local shards take memory.

    Raises:
        ConfigError: The state does not fit into this rank's memory.
    """
    rank = mesh.get_local_rank("pp") if mesh is not None else 0
    stages = pipeline.stages_of(config.model.n_layer, pp=topology.pp, vpp=topology.vpp, rank=rank)
    models = [build_stage(config, stage=stage, topology=topology, mesh=mesh) for stage in stages]
    require_memory(models, config, cluster)
    for model in models:
        allocate(model, cluster.device)
    return models


def build_stage(config: Config, *, stage: Stage, topology: Topology, mesh: DeviceMesh | None) -> Model:
    """Build a stage on `meta`, and shard it over the mesh.

    Tied embeddings are tied again after every operation which separates them.
    """
    dtype = compute_dtype(config)
    with torch.device("meta"):
        model = build_model(config.model, stage=stage, compute_dtype=dtype)
    model.activation_checkpointing = config.train.activation_checkpointing
    tensor_mesh = mesh["tp"] if mesh is not None and topology.tp > 1 else None
    if config.parallel.invariant_tensor_ranks:
        from trainer.parallel import virtual_shards

        virtual_shards.shard(model, _shards(config, tensor_mesh), tensor_mesh)
        model.tie_weights()
    elif tensor_mesh is not None:
        from trainer.parallel import tensor

        tensor.shard(model, tensor_mesh, sequence_parallel=topology.sp)
        model.tie_weights()
    _freeze(model, config.frozen)
    if config.model.is_adapted:
        from trainer.parallel.adapters import add_adapters

        add_adapters(model, tensor_mesh)
    blocks = list(model.blocks.values())
    if config.train.compile:
        for block in blocks:
            block.compile()
    if mesh is not None and topology.dp > 1:
        block_dtype, rest_dtype = gathered_dtypes(config, topology)
        # Lanes add over copies in their own tree.
        shares_mean = topology.replicate > 1 and config.lanes is None
        data_mesh = mesh["replicate", "dp"] if shares_mean else mesh["dp"]
        zero_stage = config.parallel.zero_stage
        data.shard(model, blocks, data_mesh, zero_stage=zero_stage, compute_dtype=block_dtype, rest_dtype=rest_dtype)
    return model


def allocate(model: Model, device: torch.device) -> None:
    """Allocate a stage's zeros on `device`."""
    # Like `to_empty`, whose `empty_like` imports sympy for a meta tensor, which delays a start by 0.3 s.
    model._apply(lambda like: with_memory(like, _empty(local_of(like), device)))  # type: ignore[no-untyped-call]
    model.tie_weights()
    for parameter in model.parameters():
        local_of(parameter).zero_()


def _shards(config: Config, mesh: DeviceMesh | None) -> Shards:
    """Return the virtual shards for `parallel.invariant_tensor_ranks`, over a tensor-parallel mesh if there is one."""
    from trainer.parallel.shard_sums import Shards

    parallel = config.parallel
    return Shards(
        parallel.invariant_tensor_ranks, None if mesh is None else mesh.get_group(), parallel.sequence_parallel
    )


def _freeze(model: Model, names: Collection[str]) -> None:
    """Disable gradients for parameters with these stored names. Comes before FSDP2, which groups parameters by it."""
    stored = families.aliases(model.config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(stored.get(name, name) not in names)


def _empty(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


def gathered_dtypes(config: Config, topology: Topology) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes in which FSDP2 gathers the blocks' parameters, and all other parameters.

    With `invariant_ranks`, gradients must be rounded where a single rank rounds them. A weight used once per
    micro-batch is rounded once in either case. A table's gradient adds rows, and tensor parallelism adds norm gradients
    over ranks; a single rank does both in float32. A block compiled for a single rank casts its weights inside, where
    the compiler may omit the rounding.
    """
    dtype = compute_dtype(config)
    if config.parallel.invariant_ranks == 0:
        return dtype, dtype
    casts_at_use = topology.tp > 1 or config.parallel.invariant_tensor_ranks > 0 or config.train.compile
    return torch.float32 if casts_at_use else dtype, torch.float32


def build_context(
    config: Config, state: TrainerState, *, topology: Topology, mesh: DeviceMesh | None, cluster: Cluster
) -> ParallelContext:
    """Return a run's parallel context. Collective."""
    place = topology.coordinate(cluster.rank)
    tensor_mesh = mesh["tp"] if mesh is not None and topology.tp > 1 else None
    loss, loss_context = _loss(config, tensor_mesh)
    has_tied_ends = topology.pp > 1 and config.model.tie_word_embeddings
    embedding_group = pipeline.embedding_group(mesh) if mesh is not None and has_tied_ends else None
    return ParallelContext(
        reduction=_build_reduction(config, state, topology, mesh, embedding_group),
        lanes=config.lanes,
        loss=loss,
        loss_context=loss_context,
        pipeline=None if mesh is None or topology.pp == 1 else _build_pipeline(config, state, topology, mesh, loss),
        reports_loss=place.pp == topology.pp - 1 and place.tp == 0,
        grad_norm_shares=_grad_norm_shares(config, state, topology, cluster.rank),
        form=window_form(config.data),
    )


def _build_reduction(
    config: Config,
    state: TrainerState,
    topology: Topology,
    mesh: DeviceMesh | None,
    embedding_group: dist.ProcessGroup | None,
) -> GradientReduction:
    dp_mesh = mesh["dp"] if mesh is not None and topology.dp > 1 else None
    copies = mesh.get_group("replicate") if mesh is not None and topology.replicate > 1 else None
    models, zero_stage = [part.model for part in state.parts], config.parallel.zero_stage
    lanes = config.lanes
    if lanes is None:
        is_tensor_parallel = topology.tp > 1
        parameters = list(state.parameters())
        has_copies = copies is not None
        return MeanReduction(models, parameters, zero_stage, dp_mesh, is_tensor_parallel, embedding_group, has_copies)
    if config.parallel.reduces_lanes_over_ranks(topology):
        return ShardedLanes(models[0], list(state.parameters()), lanes, copies)
    return LocalLanes(
        models, lanes, zero_stage=zero_stage, data=dp_mesh, copies=copies, embedding_group=embedding_group
    )


def _loss(config: Config, mesh: DeviceMesh | None) -> tuple[pipeline.Loss, Callable[[], AbstractContextManager[None]]]:
    """Return the loss, given logits over the tensor-parallel mesh and targets, and its context."""
    if config.parallel.invariant_tensor_ranks:
        from trainer.parallel import virtual_shards

        return functools.partial(virtual_shards.cross_entropy, shards=_shards(config, mesh)), nullcontext
    if mesh is None:
        # A compiled loss avoids float32 copies of the logits, the largest activation.
        return torch.compile(token_loss) if config.train.compile else token_loss, nullcontext
    from trainer.parallel import tensor

    rows = config.model.padded_vocab_size
    return functools.partial(tensor.vocab_parallel_cross_entropy, mesh=mesh, rows=rows), tensor.loss_parallel


def _build_pipeline(
    config: Config,
    state: TrainerState,
    topology: Topology,
    mesh: DeviceMesh,
    loss: pipeline.Loss,
) -> pipeline.Pipeline:
    lo, hi = cut(0, config.model.padded_vocab_size, index=mesh.get_local_rank("tp"), count=topology.tp)
    parts, shards = [part.model for part in state.parts], config.parallel.invariant_tensor_ranks // topology.tp
    size, length, device = config.train.micro_batch_size, config.train.seq_length, next(parts[0].parameters()).device
    # Examples need no memory. Without requires_grad the schedule sends no gradient back.
    activation = functools.partial(torch.empty, dtype=compute_dtype(config), device="meta", requires_grad=True)
    logits = activation(size, length, hi - lo)
    if shards:
        logits = activation(shards, size, length, (hi - lo) // shards).permute(1, 2, 0, 3)
    return pipeline.Pipeline(
        parts,
        mesh["pp"],
        tokens=torch.empty(size, length, dtype=torch.int64, device=device),
        hidden=activation(size, length // (topology.tp if topology.sp else 1), config.model.n_embd),
        logits=logits,
        loss=loss,
        takes_mean=config.lanes is None,
        form=window_form(config.data),
    )


def _grad_norm_shares(config: Config, state: TrainerState, topology: Topology, rank: int) -> list[NormShare]:
    """Return this rank's parameters in the gradient norm."""
    replicas = {tensor.spec.name: tensor.replicas for tensor in state.shards(with_optimizer=False)}
    names = families.aliases(config.model)
    shards = config.parallel.invariant_tensor_ranks // topology.tp
    cuts = dict[str, int]()
    if shards:
        from trainer.parallel.virtual_shards import cut_parameters

        for part in state.parts:
            cuts |= cut_parameters(part.model)
    return [
        NormShare(parameter, holders.index(rank), len(holders), shards, cuts.get(name, 0))
        for part in state.parts
        for parameter, name in stored_names(part.model).items()
        if (holders := replicas.get(names.get(name, name))) is not None and parameter.requires_grad
    ]


def compute_dtype(config: Config) -> torch.dtype:
    """Return the dtype for activations and matrix products."""
    dtype: torch.dtype = getattr(torch, config.train.dtype.value)
    return dtype
