"""Checks a configuration before anything is built, without reading files, and reports every problem."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from models.adapters import adapter_problems, is_adapted
from models.config import ModelConfig
from models.families import parameter_count
from models.families import problems as model_problems
from reprise.errors import ConfigError
from trainer.config.derived import batch_schedule_of, command_line, length_of, topology_of
from trainer.config.frozen import freeze_problems
from trainer.config.schema import (
    SINKS,
    CheckpointSection,
    Config,
    LocalSection,
    NewRows,
    OptimizerName,
    OptimizerSection,
    TrainSection,
)
from trainer.config.values import number_problems, path_problems, type_problems
from trainer.data.section import TOKEN_KINDS
from trainer.data.section import problems as data_problems
from trainer.parallel.lanes import invariant_ranks_problems
from trainer.parallel.topology import ACCELERATORS, MOST_THREADS, Topology
from trainer.schedules.lr import problems as schedule_problems

# Clocks, timers and torch's stores count in 64 bits of small units: 30 years are enough.
_MOST_SECONDS, _MOST_MINUTES = 1e9, 1e7
# Practical limits of a dry run's table and of a model built of modules.
_MOST_RANKS, _MOST_LAYERS, _MOST_PARAMETERS = 1 << 20, 10_000, 10**16


def validate(config: Config, world_size: int) -> None:
    """Refuse a configuration that cannot run on `world_size` ranks, before anything is built.

    Raises:
        ConfigError: one message that lists every problem with its key.
    """
    found = [*number_problems(config), *type_problems(config)] or [  # comparisons with NaN are always false
        *path_problems(config),
        *(model_problems(config.model) or _size_problems(config.model) or _trained_problems(config)),
        *data_problems(config.data),
        *_train_problems(config),
        *_length_problems(config),
        *_parallel_problems(config, world_size),
        *batch_problems(config, world_size, _first_known_position(config)),
        *_optimizer_problems(config.optimizer),
        *_checkpoint_problems(config),
    ]
    if found:
        lines = "\n".join(f"  {problem}" for problem in found)
        raise ConfigError(f"The configuration cannot run:\n{lines}\nNothing was started")


def require_ranks(config: Config, world_size: int, words: Sequence[str]) -> None:
    """Refuse one process where the parallel layout needs several.

    Args:
        words: those of the command.

    Raises:
        ConfigError: with the same command under torchrun.
    """
    ranks = config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size
    if world_size == 1 and ranks > 1:
        raise ConfigError(
            "The parallel layout needs several processes",
            expected=f"{ranks} ranks, or a multiple",
            found="1 process",
            fix=f"Start it with `{command_line(shlex.join(words), ranks)}`.",
        )


def unused_keys(config: Config) -> list[str]:
    """Return lines that name the keys that are set although another key leaves them without use."""
    section, local, train = config.checkpoint, config.checkpoint.local, config.train
    lines = []
    if train.train_samples is not None and train.train_iters != TrainSection().train_iters:
        lines.append(
            f"train.train_samples={train.train_samples} is the length of the run, so train.train_iters="
            f"{train.train_iters} is not used"
        )
    for table, defaults, prefix, folder, names in (
        (section, CheckpointSection(), "checkpoint", "save", (*_OF_SAVING, "save_steps")),
        (local, LocalSection(), "checkpoint.local", "dir", _OF_LOCAL),
    ):
        keys = [name for name in names if getattr(table, name) != getattr(defaults, name)]
        if keys and getattr(table, folder) is None:
            named = ", ".join(f"{prefix}.{name}={getattr(table, name)}" for name in keys)
            lines.append(f"{prefix}.{folder} is null, so these keys are not used: {named}")
    return lines


def loose_threads(config: Config) -> list[str]:
    """Return a line about `train.threads` if the bits that `invariant_ranks` keeps depend on it and it is not set."""
    lanes, train = config.parallel.invariant_ranks, config.train
    if lanes == 0 or train.threads > 0 or train.device in ACCELERATORS:
        return []
    return [
        f"train.threads is 0, so a rank has its share of the cores of its host: parallel.invariant_ranks={lanes} keeps "
        "the bits only between launches with equal numbers of threads"
    ]


def _size_problems(model: ModelConfig) -> list[str]:
    """Return why a valid model exceeds every machine, dry runs included."""
    if model.n_layer > _MOST_LAYERS:
        return [f"model.n_layer={model.n_layer}: must be at most {_MOST_LAYERS}"]
    count = parameter_count(model)
    return [f"model: {count:,} parameters, must be at most {_MOST_PARAMETERS:,}"] if count > _MOST_PARAMETERS else []


def _trained_problems(config: Config) -> list[str]:
    """Return why the choice of what is trained, and what is frozen, cannot run."""
    model, section = config.model, config.checkpoint
    found = adapter_problems(model) or freeze_problems(model, config.train.freeze)
    if found or not is_adapted(model):
        return found
    if config.optimizer.name is not OptimizerName.adamw:
        found.append(f"optimizer.name={config.optimizer.name.value}: adapters are trained by adamw")
    if section.resize or section.partial:
        found.append("checkpoint.resize and checkpoint.partial: not with model.lora.rank, a base is loaded as a whole")
    if model.lora.dropout and config.train.compile:
        found.append(f"model.lora.dropout={model.lora.dropout}: not with train.compile, set one of them to 0 or false")
    if section.base is None and not section.finetune and not config.train.dry_run:
        found.append(
            f"model.lora.rank={model.lora.rank}: needs the weights beneath the adapters: checkpoint.base=PATH, or "
            "checkpoint.load=PATH checkpoint.finetune=true"
        )
    return found


def _train_problems(config: Config) -> list[str]:
    train, found = config.train, []
    for name in (
        "train_iters",
        "global_batch_size",
        "micro_batch_size",
        "seq_length",
        "eval_iters",
        "sample_tokens",
        "dry_run_ranks",
    ):
        if getattr(train, name) < 1:
            found.append(f"train.{name}={getattr(train, name)}: must be at least 1")
    for name in (
        "eval_interval",
        "sample_interval",
        "exit_interval",
        "exit_duration_in_mins",
        "check_replicas_interval",
    ):
        if getattr(train, name) < 0:
            found.append(f"train.{name}={getattr(train, name)}: must be 0 (never) or more")
    if train.clip_grad < 0:
        found.append(f"train.clip_grad={train.clip_grad}: must be 0 (no clipping) or more")
    for name, most in (("exit_signal_save_seconds", _MOST_SECONDS), ("distributed_timeout_minutes", _MOST_MINUTES)):
        if not 0 < getattr(train, name) <= most:
            found.append(f"train.{name}={getattr(train, name)}: must be above 0 and at most {most:g}")
    if train.seed < 0:
        found.append(f"train.seed={train.seed}: must be 0 or more")
    if not 0 <= train.threads <= MOST_THREADS:
        found.append(f"train.threads={train.threads}: must be 0 (a share of the cores) or more, at most {MOST_THREADS}")
    if train.dry_run_ranks > _MOST_RANKS:
        found.append(f"train.dry_run_ranks={train.dry_run_ranks}: must be at most {_MOST_RANKS}")
    if train.seq_length > config.model.max_position_embeddings:
        limit = config.model.max_position_embeddings
        found.append(f"train.seq_length={train.seq_length}: above model.max_position_embeddings={limit}")
    if train.device not in ("auto", "cpu", *ACCELERATORS):
        found.append(f"train.device={train.device}: must be auto, cpu, {' or '.join(ACCELERATORS)}")
    steps = train.profile_steps
    if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        found.append(f"train.profile_steps={steps}: must be empty, or a first and a last iteration as in [10,13]")
    if config.logging.log_interval < 1:
        found.append(f"logging.log_interval={config.logging.log_interval}: must be at least 1")
    found += [
        f"logging.sinks={config.logging.sinks}: {name} is none of {', '.join(SINKS)}"
        for name in config.logging.sinks
        if name not in SINKS
    ]
    if train.eval_interval and config.data.kind in TOKEN_KINDS and config.data.valid is None:
        found.append(f"train.eval_interval={train.eval_interval}: needs data.valid, or set it to 0")
    if train.sample_interval and config.data.kind in TOKEN_KINDS and config.data.tokenizer is None:
        found.append(
            f"train.sample_interval={train.sample_interval}: needs data.tokenizer, the tokenizer.json that wrote the "
            "token files, or bytes; or set it to 0"
        )
    return found


def _length_problems(config: Config) -> list[str]:
    """Return the problems of the run's length in samples, or else those of its learning-rate schedule."""
    train = config.train
    if train.global_batch_size < 1:  # named by `_train_problems`; there is no length then
        return []
    try:
        sizes = batch_schedule_of(train)
    except ValueError as error:
        return [f"train.batch_schedule={train.batch_schedule}: {error}"]
    found = []
    if sizes.last != train.global_batch_size:
        found.append(
            f"train.global_batch_size={train.global_batch_size}: must be {sizes.last}, the last size of "
            f"train.batch_schedule={train.batch_schedule}"
        )
    if len(sizes.sizes) > 1 and config.parallel.invariant_ranks:
        found.append(
            f"train.batch_schedule={train.batch_schedule}: not with parallel.invariant_ranks="
            f"{config.parallel.invariant_ranks}, whose lanes divide one size"
        )
    if train.train_samples is not None and train.train_samples < sizes.at(0):
        found.append(
            f"train.train_samples={train.train_samples}: must be at least the {sizes.at(0)} samples of one iteration"
        )
    return found or schedule_problems(config.schedule, length_of(train), config.optimizer.lr)


def _parallel_problems(config: Config, world_size: int) -> list[str]:
    parallel, model = config.parallel, config.model
    found: list[str] = []
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    vpp = parallel.num_virtual_stages_per_pipeline_rank
    if parallel.zero_stage not in range(4):
        found.append(f"parallel.zero_stage={parallel.zero_stage}: must be 0, 1, 2 or 3")
    for name in _PARALLEL_SIZES:
        if getattr(parallel, name) < 1:
            found.append(f"parallel.{name}={getattr(parallel, name)}: must be at least 1")
    if found:
        return found
    if world_size % (tp * pp):
        found.append(
            f"{world_size} ranks: must be a multiple of parallel.tensor_model_parallel_size={tp} times "
            f"parallel.pipeline_model_parallel_size={pp}, that is of {tp * pp}"
        )
    for name in ("n_head", "n_kv_head", "intermediate_size"):
        if getattr(model, name) % tp:
            size = getattr(model, name)
            found.append(f"parallel.tensor_model_parallel_size={tp}: must divide model.{name}={size}")
    if parallel.sequence_parallel and (tp == 1 or config.train.seq_length % tp):
        found.append(
            f"parallel.sequence_parallel: needs a parallel.tensor_model_parallel_size above 1 that divides "
            f"train.seq_length={config.train.seq_length}, found {tp}"
        )
    if pp * vpp > max(1, model.n_layer):
        found.append(f"{pp} pipeline ranks of {vpp} stages: more than model.n_layer={model.n_layer}")
    if vpp > 1 and pp == 1:
        found.append(f"parallel.num_virtual_stages_per_pipeline_rank={vpp}: needs more than one pipeline rank")
    return found


_PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
)


def _first_known_position(config: Config) -> int:
    """Return the consumed samples at which a run begins; the largest number where only its checkpoint says so."""
    begins_anew = config.checkpoint.load == "none" or config.train.dry_run
    return 0 if begins_anew else sys.maxsize


def batch_problems(config: Config, world_size: int, consumed_samples: int) -> list[str]:
    """Return why iterations cannot have the global batch sizes from a count of consumed samples on.

    Ranks may be more than an earlier size could be divided among.
    """
    train = config.train
    sizes = [getattr(config.parallel, name) for name in _PARALLEL_SIZES]
    if min(train.micro_batch_size, train.global_batch_size, world_size, *sizes) < 1 or world_size % (
        sizes[0] * sizes[1]
    ):
        return []
    topology = topology_of(config, world_size)
    if train.batch_schedule is None:
        return _size_problems_of_batch(config, topology, train.global_batch_size, "train.global_batch_size={}")
    try:
        steps = batch_schedule_of(train).steps_from(consumed_samples)
    except ValueError:  # named by `_length_problems`
        return []
    return [
        problem
        for first, size in steps
        for problem in _size_problems_of_batch(config, topology, size, f"train.batch_schedule={first}:{{}}")
    ]


def _size_problems_of_batch(config: Config, topology: Topology, size: int, key: str) -> list[str]:
    """Return why iterations of a size cannot be.

    Args:
        key: the key that gives the size, with a place for it.
    """
    train, found = config.train, list[str]()
    divisor = train.micro_batch_size * topology.dp
    if size % divisor:
        found.append(
            f"{key.format(size)}: must be a multiple of train.micro_batch_size="
            f"{train.micro_batch_size} times the {topology.dp} data-parallel ranks, that is of {divisor}"
        )
        return found
    count = size // divisor
    lanes = config.parallel.invariant_ranks
    found += invariant_ranks_problems(lanes, ranks=topology.dp, micro_batches=count * topology.dp)
    name = key.format(size) if train.batch_schedule is not None else "train.global_batch_size"
    if topology.pp > 1 and count < topology.pp:
        found.append(
            f"{count} micro batches per iteration: fewer than the {topology.pp} pipeline ranks; raise "
            f"{name} or lower train.micro_batch_size"
        )
    elif topology.vpp > 1 and count % (rounds := max(1, count // topology.pp)):
        # torch/distributed/pipelining/schedules.py, ScheduleInterleaved1F1B.
        where = "" if train.batch_schedule is None else f" ({name})"
        found.append(f"{count} micro batches per iteration{where}: interleaved stages need a multiple of {rounds}")
    return found


def _optimizer_problems(optimizer: OptimizerSection) -> list[str]:
    found = []
    for name in ("lr", "weight_decay", "adam_eps"):
        value = getattr(optimizer, name)
        if value < 0:
            found.append(f"optimizer.{name}={value}: must be at least 0")
    if not 1 <= optimizer.muon_ns_steps < 100:
        found.append(f"optimizer.muon_ns_steps={optimizer.muon_ns_steps}: must be at least 1 and below 100")
    for name in ("adam_beta1", "adam_beta2", "muon_momentum"):
        if not 0 <= getattr(optimizer, name) < 1:
            found.append(f"optimizer.{name}={getattr(optimizer, name)}: must be at least 0 and below 1")
    return found


_OF_SAVING = (
    "save_interval",
    "save_interval_mins",
    "max_checkpoint_keep",
    "keep_best",
    "save_retain_interval",
    "check_replicas",
    "exit_on_save_failure",
    "save_weights_interval",
    "weights_keep",
)


_OF_LOCAL = ("save_interval", "keep", "copies", "flush_on_exit")


def _checkpoint_problems(config: Config) -> list[str]:
    section, found = config.checkpoint, []
    for name in _OF_SAVING:
        if getattr(section, name) < 0:
            found.append(f"checkpoint.{name}={getattr(section, name)}: must be 0 or more")
    for name, least in (("save_interval", 0), ("keep", 1), ("copies", 0)):
        if getattr(section.local, name) < least:
            found.append(f"checkpoint.local.{name}={getattr(section.local, name)}: must be {least} or more")
    if any(step < 0 for step in section.save_steps):
        found.append(f"checkpoint.save_steps={section.save_steps}: must be iterations of 0 or more")
    if section.local.dir is not None and section.local.dir == section.save:
        found.append(f"checkpoint.local.dir={section.local.dir}: must be another folder than checkpoint.save")
    if section.keep_best and not (config.train.eval_interval and section.max_checkpoint_keep):
        found.append(
            f"checkpoint.keep_best={section.keep_best}: needs train.eval_interval and checkpoint.max_checkpoint_keep"
        )
    if section.file_bytes < 1:
        found.append(f"checkpoint.file_bytes={section.file_bytes}: must be at least 1")
    for name in ("commit_timeout_s", "stall_timeout_s"):
        if not 0 < getattr(section, name) <= _MOST_SECONDS:
            found.append(f"checkpoint.{name}={getattr(section, name)}: must be above 0 and at most {_MOST_SECONDS:g}")
    if section.staging_bytes is not None and section.staging_bytes < 0:
        found.append(f"checkpoint.staging_bytes={section.staging_bytes}: must be 0 or more, or null")
    if section.override_scheduler and section.use_checkpoint_scheduler:
        found.append("checkpoint.override_scheduler and checkpoint.use_checkpoint_scheduler exclude each other")
    if section.base is not None and not is_adapted(config.model):
        found.append(f"checkpoint.base={section.base}: serves adapters only, and model.lora.rank is 0")
    if section.finetune and section.load in ("auto", "none"):
        found.append(f"checkpoint.finetune: needs checkpoint.load=PATH, found {section.load}")
    for name in ("resize", "partial"):
        if getattr(section, name) and not section.finetune:
            found.append(f"checkpoint.{name}={getattr(section, name)}: needs checkpoint.finetune=true")
    if section.new_rows is not NewRows.initial and not section.resize:
        found.append(f"checkpoint.new_rows={section.new_rows.value}: needs checkpoint.resize=true")
    if section.ckpt_step is not None and section.ckpt_step < 0:
        found.append(f"checkpoint.ckpt_step={section.ckpt_step}: must be 0 or more, or null")
    if section.ckpt_step is not None and section.load == "none":
        found.append(f"checkpoint.ckpt_step={section.ckpt_step}: nothing is loaded with checkpoint.load=none")
    return found
