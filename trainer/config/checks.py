"""Checks a configuration before anything is built, without reading files, and reports every problem."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from models.adapters import adapter_problems
from models.families import problems as model_problems
from reprise.errors import ConfigError, count_of
from trainer.config.checkpoint import checkpoint_problems
from trainer.config.frozen import freeze_problems
from trainer.config.logging import logging_problems
from trainer.config.optimizer import OptimizerName, optimizer_problems
from trainer.config.parallel import PARALLEL_SIZES, ParallelSection
from trainer.config.schema import Config
from trainer.config.train import AUTO, OnSpike, TrainSection, train_problems
from trainer.config.values import path_problems, range_problems, value_problems
from trainer.data.section import TOKEN_KINDS
from trainer.data.section import problems as data_problems
from trainer.parallel.lanes import count_problems
from trainer.parallel.topology import Topology
from trainer.schedules.batch_size import BatchSchedule
from trainer.schedules.lr import problems as schedule_problems

_MOST_TRIED = 1 << 16  # micro-batch sizes


def validate(config: Config, world_size: int) -> Config:
    """Return a configuration with a number for `train.micro_batch_size=auto`, before anything is built.

    Raises:
        ConfigError: The configuration cannot run on `world_size` ranks. The message lists every problem with its key.
    """
    enough = max(world_size, _model_ranks(config.parallel))  # the other problems are those on enough ranks
    config = with_micro_batch(config, enough)
    problems = [*_size_type_problems(config.train), *value_problems(config)] or [  # comparisons with NaN are false
        *range_problems(config),
        *path_problems(config),
        *(model_problems(config.model) or _trained_problems(config)),
        *data_problems(config.data),
        *train_problems(config.train),
        *optimizer_problems(config.optimizer),
        *checkpoint_problems(config.checkpoint),
        *logging_problems(config.logging),
        *_data_needs(config),
        *_length_problems(config),
        *_rank_problems(config.parallel, world_size),
        *_parallel_problems(config, enough),
        *batch_problems(config, enough, _first_known_position(config)),
        *_save_needs(config),
    ]
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ConfigError(f"The configuration cannot run:\n{lines}\nNothing was started")
    return config


def with_micro_batch(config: Config, world_size: int) -> Config:
    """Return the configuration with a number for `train.micro_batch_size=auto`, or 1 if no size is possible."""
    train = config.train
    if str(train.micro_batch_size) != AUTO:
        return config

    def with_size(size: int) -> Config:
        return replace(config, train=replace(train, micro_batch_size=size))

    if not _has_shares(config, world_size):
        return with_size(1)
    dp = config.parallel.topology(world_size).dp

    def most_samples(size: int) -> int:
        return size * math.ceil(train.global_batch_size / (size * dp))

    most = min(train.max_micro_batch_size, train.global_batch_size, _MOST_TRIED)
    sizes = [size for size in range(1, most + 1) if train.global_batch_size % size == 0]
    first = _first_known_position(config)
    possible = [size for size in sizes if not any(batch_problems(with_size(size), world_size, first))]
    return with_size(min(possible, key=lambda size: (most_samples(size), -size), default=1))


def _size_type_problems(train: TrainSection) -> Iterator[str]:
    size: object = train.micro_batch_size
    if type(size) is not int:
        yield f"train.micro_batch_size={size}: must be an integer, or {AUTO}"


def _trained_problems(config: Config) -> Iterator[str]:
    """List problems with adapters and frozen parameters."""
    model, section = config.model, config.checkpoint
    problems = adapter_problems(model) or [*freeze_problems(model, config.train.freeze)]
    yield from problems
    if problems or not model.is_adapted:
        return
    if config.optimizer.name is not OptimizerName.adamw:
        yield f"optimizer.name={config.optimizer.name.value}: adapters need optimizer.name=adamw"
    if section.resize:
        yield "checkpoint.resize=true: needs model.lora.rank=0, because a base is loaded in full"
    if model.lora.dropout and config.train.compile:
        yield (
            f"model.lora.dropout={model.lora.dropout}: cannot be used with train.compile; set one of them to 0 or false"
        )
    if section.base is None and not section.finetune and not config.train.dry_run:
        yield (
            f"model.lora.rank={model.lora.rank}: needs base weights: set checkpoint.base=PATH, or "
            "checkpoint.load=PATH checkpoint.finetune=true"
        )


def _data_needs(config: Config) -> Iterator[str]:
    """List `train` keys in conflict with the model or the data."""
    train = config.train
    if train.seq_length > config.model.max_position_embeddings:
        limit = config.model.max_position_embeddings
        yield f"train.seq_length={train.seq_length}: above model.max_position_embeddings={limit}"
    if train.eval_interval and config.data.kind in TOKEN_KINDS and config.data.valid is None:
        yield f"train.eval_interval={train.eval_interval}: needs data.valid, or set it to 0"


def _length_problems(config: Config) -> Iterator[str]:
    """List problems with the run's length in samples or, if there are none, with its learning-rate schedule."""
    train = config.train
    sizes = _known_sizes(train)
    if train.global_batch_size < 1 or sizes is None:  # no length exists
        return
    if sizes.last != train.global_batch_size:
        yield (
            f"train.global_batch_size={train.global_batch_size}: must be {sizes.last}, the last size of "
            f"train.batch_schedule={train.batch_schedule}"
        )
    if len(sizes.sizes) > 1 and config.parallel.invariant_ranks:
        yield (
            f"train.batch_schedule={train.batch_schedule}: cannot be used with parallel.invariant_ranks="
            f"{config.parallel.invariant_ranks}, which needs a constant batch size"
        )
    if train.train_samples is not None and train.train_samples < sizes.at(0):
        yield (
            f"train.train_samples={train.train_samples}: must be at least the {sizes.at(0)} samples of one iteration"
        )
    yield from schedule_problems(config.schedule, train.length, config.optimizer.lr)


def _known_sizes(train: TrainSection) -> BatchSchedule | None:
    """Return the global batch sizes. None for a malformed schedule, reported by `train_problems`."""
    with suppress(ValueError):
        return train.batch_sizes
    return None


def _model_ranks(parallel: ParallelSection) -> int:
    """Return how many ranks hold a copy of the model."""
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size


def _rank_problems(parallel: ParallelSection, world_size: int) -> Iterator[str]:
    ranks = _model_ranks(parallel)
    if _are_positive(parallel) and world_size % ranks:
        yield (
            f"{count_of(world_size, 'rank')}: must be a multiple of "
            f"parallel.tensor_model_parallel_size={parallel.tensor_model_parallel_size} times "
            f"parallel.pipeline_model_parallel_size={parallel.pipeline_model_parallel_size}, as with "
            f"`torchrun --no-python --nproc-per-node {ranks}`"
        )


def _parallel_problems(config: Config, world_size: int) -> Iterator[str]:
    parallel, model = config.parallel, config.model
    if not _are_positive(parallel):  # reported by `range_problems`
        return
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    vpp = parallel.num_virtual_stages_per_pipeline_rank
    for name in ("n_head", "n_kv_head", "intermediate_size"):
        if getattr(model, name) % tp:
            size = getattr(model, name)
            yield f"parallel.tensor_model_parallel_size={tp}: must divide model.{name}={size}"
    if parallel.sequence_parallel and (tp == 1 or config.train.seq_length % tp):
        yield (
            f"parallel.sequence_parallel: needs a parallel.tensor_model_parallel_size above 1 that divides "
            f"train.seq_length={config.train.seq_length}, found {tp}"
        )
    copies, data_ranks = parallel.replicate, world_size // (tp * pp)
    if copies > 1 and (parallel.zero_stage == 0 or data_ranks % copies or data_ranks == copies):
        yield (
            f"parallel.replicate={copies}: needs parallel.zero_stage above 0, and a divisor of the {data_ranks} "
            "data-parallel ranks, with at least 2 per copy"
        )
    yield from _invariant_tensor_problems(config)
    if pp * vpp > max(1, model.n_layer):
        yield f"{pp} pipeline ranks of {vpp} stages: more than model.n_layer={model.n_layer}"
    if vpp > 1 and pp == 1:
        yield f"parallel.num_virtual_stages_per_pipeline_rank={vpp}: needs more than one pipeline rank"


def _invariant_tensor_problems(config: Config) -> Iterator[str]:
    """List problems with `parallel.invariant_tensor_ranks`."""
    parallel, model, train = config.parallel, config.model, config.train
    count, tp = parallel.invariant_tensor_ranks, parallel.tensor_model_parallel_size
    if count == 0:
        return
    sizes = {
        "model.n_head": model.n_head,
        "model.n_kv_head": model.n_kv_head,
        "model.intermediate_size": model.intermediate_size,
        "model.vocab_size with the padding of model.pad_vocab_multiple": model.padded_vocab_size,
    }
    if parallel.sequence_parallel:
        sizes["train.seq_length"] = train.seq_length
    key = "parallel.invariant_tensor_ranks"
    yield from count_problems(key, count, sizes, ("parallel.tensor_model_parallel_size", tp))
    key = f"{key}={count}"
    if parallel.invariant_ranks == 0:
        yield f"{key}: needs parallel.invariant_ranks, which fixes the sums over micro-batches and ranks"
    if train.compile:
        yield f"{key}: cannot be used with train.compile, which fuses operations that must stay separate"
    if model.is_adapted:
        yield f"{key}: cannot be used with model.lora.rank={model.lora.rank}"


def _first_known_position(config: Config) -> int:
    """Return the consumed samples at a run's start, or the largest integer if only its checkpoint knows."""
    starts_fresh = config.checkpoint.load == "none" or config.train.dry_run
    return 0 if starts_fresh else sys.maxsize


def batch_problems(config: Config, world_size: int, consumed_samples: int) -> Iterator[str]:
    """Explain why iterations from `consumed_samples` on cannot have their global batch sizes.

    Earlier sizes are not checked: the rank count may be too large for them.
    """
    train = config.train
    if train.micro_batch_size < 1 or not _has_shares(config, world_size):
        return
    topology = config.parallel.topology(world_size)
    if train.batch_schedule is None:
        yield from _batch_size_problems(config, topology, train.global_batch_size, "train.global_batch_size={}")
        return
    sizes = _known_sizes(train)
    for first, size in () if sizes is None else sizes.steps_from(consumed_samples):
        yield from _batch_size_problems(config, topology, size, f"train.batch_schedule={first}:{{}}")


def _has_shares(config: Config, world_size: int) -> bool:
    """Return whether an iteration can be shared among data-parallel ranks. If not, other checks say why."""
    parallel, batch_size = config.parallel, config.train.global_batch_size
    return batch_size >= 1 and world_size >= 1 and _are_positive(parallel) and world_size % _model_ranks(parallel) == 0


def _are_positive(parallel: ParallelSection) -> bool:
    return all(getattr(parallel, name) >= 1 for name in PARALLEL_SIZES)


def _batch_size_problems(config: Config, topology: Topology, size: int, key: str) -> Iterator[str]:
    """List problems with a global batch size.

    Args:
        key: The key setting the size, with a placeholder for it.
    """
    train, each = config.train, config.train.micro_batch_size
    least = each * topology.dp
    unit = least if topology.pp > 1 else each  # shares are equal in a pipeline
    if size % unit or size < least:
        hint = f"; train.micro_batch_size={AUTO} chooses a size" if each > 1 else ""
        hint += "; a pipeline's data-parallel ranks have equal shares" if topology.pp > 1 else ""
        yield (
            f"{key.format(size)}: must be a multiple of {unit} and at least {least}, with "
            f"train.micro_batch_size={each} on {count_of(topology.dp, 'data-parallel rank')}{hint}"
        )
        return
    count = size // least
    sizes = {"micro-batches (train.global_batch_size / train.micro_batch_size)": size // train.micro_batch_size}
    lanes = config.parallel.invariant_ranks
    yield from count_problems("parallel.invariant_ranks", lanes, sizes, ("data-parallel ranks", topology.dp))
    name = key.format(size) if train.batch_schedule is not None else "train.global_batch_size"
    if topology.pp > 1 and count < topology.pp:
        yield (
            f"{count} micro-batches per iteration: fewer than the {topology.pp} pipeline ranks; raise "
            f"{name} or lower train.micro_batch_size"
        )
    elif topology.vpp > 1 and count % (rounds := max(1, count // topology.pp)):
        # torch/distributed/pipelining/schedules.py, ScheduleInterleaved1F1B.
        yield f"{count} micro-batches per iteration, from {name}: interleaved stages need a multiple of {rounds}"


def _save_needs(config: Config) -> Iterator[str]:
    """List conflicts between `checkpoint` keys and other sections."""
    section = config.checkpoint
    if section.keep_best and not (config.train.eval_interval and section.max_checkpoint_keep):
        yield (
            f"checkpoint.keep_best={section.keep_best}: needs train.eval_interval and checkpoint.max_checkpoint_keep"
        )
    has_folder = section.save is not None or section.local.dir is not None
    if config.train.on_spike is OnSpike.rewind and (not has_folder or section.no_save_optim):
        yield "train.on_spike=rewind: needs a folder to save to, and checkpoint.no_save_optim=false"
    if section.base is not None and not config.model.is_adapted:
        yield f"checkpoint.base={section.base}: is used only with adapters, and model.lora.rank is 0"
