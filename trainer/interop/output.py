"""Writes a state as our checkpoint, identical to a single-process run's save."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from models import families
from models.adapters import model_documents
from models.families import problems as model_problems
from reprise import saving
from reprise.errors import ConfigError, MismatchError, count_of
from reprise.format import STATE, WrittenPiece, build_layout
from reprise.storage import FILE_SYSTEM, CheckpointFolder, Document, Json, dumps, exists, replace_file
from trainer.config.checkpoint import CheckpointSection
from trainer.config.optimizer import OptimizerName
from trainer.config.parallel import ParallelSection
from trainer.config.saved import RUN_CONFIG, flattened
from trainer.config.schema import Config
from trainer.config.train import TrainSection, train_problems
from trainer.data.section import problems as data_problems
from trainer.data.text import TOKENIZER, bytes_encoder, read_tokenizer, tokenizer_path
from trainer.interop.finite import require_finite
from trainer.interop.source import StateSource
from trainer.interop.tensor_files import write_tensor_files
from trainer.metrics.json_lines import METRICS
from trainer.optim.table import SECTIONS
from trainer.record import resume_rules, run_record
from trainer.record.resume_rules import ASSUMED, differences, settle
from trainer.run.build import describe_alone, run_config
from trainer.run.inputs import tokenizer_of
from trainer.run.state import checkpoint_specs
from trainer.schedules.progress import Progress

_log = logging.getLogger(__name__)


def write_checkpoint(
    source: StateSource,
    folder: Path,
    config: Config,
    *,
    consumed_samples: int | None = None,
    stated: Sequence[str] | None = None,
) -> Path:
    """Write `folder/iter_<iteration>` from a source, as a single-rank run with `config` would, and return its path.

    Each tensor is cast to float32 in turn, and moments to `optimizer.moments_dtype`. NaN and infinity are refused. The
    folder is locked meanwhile, as during a run.

    Args:
        config: The configuration for the continued run. Its parallel layout is ignored.
        consumed_samples: Number of consumed samples. By default the source's count, or a global batch per iteration.
        stated: The user's overrides in `config`. The checkpoint marks all other settings as assumed, and a resume does
            not compare them. None if all settings are stated.

    Raises:
        TrainerError: The iteration exists already, the source holds another model, or the checkpoint cannot be written.
            Committed checkpoints are untouched.
    """
    config = replace(config, parallel=ParallelSection(zero_stage=config.parallel.zero_stage))
    if source.has_optimizer and config.optimizer.name is not OptimizerName.adamw:
        raise ConfigError(
            "The source holds AdamW state",
            expected="optimizer=adamw",
            found=f"optimizer.name={config.optimizer.name.value}",
            fix="Import the weights alone with --weights-only.",
        )
    _check(config, source)
    config = replace(config, train=_trainable(config))
    documents = _documents(source, config, consumed_samples, stated)
    frozen = config.frozen
    specs = tuple(checkpoint_specs(config.model, config.optimizer if source.has_optimizer else None, frozen))
    layout = build_layout(specs, file_bytes=config.checkpoint.file_bytes)

    def read(name: str) -> torch.Tensor:
        tensor = source.read(name)
        require_finite(tensor, where=name)
        return tensor

    def write(partial: Path) -> list[WrittenPiece]:
        return write_tensor_files(partial, FILE_SYSTEM, layout, read)

    return saving.write_checkpoint(
        CheckpointFolder(folder, FILE_SYSTEM),
        source.iteration,
        layout,
        write,
        documents=documents,
        aliases={} if config.model.is_adapted else families.aliases(config.model),
    )


def write_log(records: Sequence[Json], folder: Path) -> None:
    """Write the imported log to the run folder, unless it has a log already.

    Args:
        folder: The checkpoint folder. Without the name `checkpoints` it is not in a run folder, and nothing is written.
    """
    path = folder.parent / METRICS
    if folder.name != "checkpoints" or exists(path):
        _log.info(f"not carried: {count_of(len(records), 'record')} of the log, which belong in a new {path}")
        return
    replace_file(FILE_SYSTEM, path, "".join(f"{dumps(record)}\n" for record in records).encode())


def _check(config: Config, source: StateSource) -> None:
    """Refuse a configuration unfit for writing a checkpoint. The run validates training keys."""
    problems = model_problems(config.model)
    values = {
        "train.seq_length": config.train.seq_length,
        "train.global_batch_size": config.train.global_batch_size,
        "checkpoint.file_bytes": config.checkpoint.file_bytes,
    }
    problems += [f"{name}={value}: must be at least 1" for name, value in values.items() if value < 1]
    problems += data_problems(config.data)
    problems += train_problems(config.train)
    if config.model.is_adapted and source.base is None:
        problems.append(f"model.lora.rank={config.model.lora.rank}: the source is a whole model; set it to 0")
    if problems:
        raise ConfigError("No checkpoint can be written with this configuration", found="; ".join(problems))


def _trainable(config: Config) -> TrainSection:
    """Return the `train` section for the checkpoint, with `seq_length` limited to the model's positions."""
    most = config.model.max_position_embeddings
    if config.train.seq_length <= most:
        return config.train
    _log.info(
        f"train.seq_length={config.train.seq_length} is above the model's {most} positions: the checkpoint records "
        f"{most}, and a run continued from it needs train.seq_length={most} or less"
    )
    return replace(config.train, seq_length=most)


def _assumed(description: Json, stated: Sequence[str]) -> list[str]:
    """Return the fields and sections in a record set neither by the source nor by an override.

    An override key's last word ends with its field name: `optimizer.adam_beta2` ends with `beta2`.
    """
    keys = [override.partition("=")[0].lstrip("+") for override in stated]
    if "experiment" in keys:
        return []

    def is_stated(field: str) -> bool:
        section, _, name = field.rpartition(".")
        return any(key == section or key.rpartition(".")[2].endswith(name) for key in keys)

    assumed = list[str]()
    for section in _SETTINGS:
        fields = [field for field in flattened(description) if field.split(".")[0] == section]
        unstated = [field for field in fields if not is_stated(field)]
        assumed += [section] if unstated == fields else unstated
    return assumed


def _documents(
    source: StateSource, config: Config, consumed_samples: int | None, stated: Sequence[str] | None
) -> dict[str, Document]:
    schedule, description = describe_alone(config)
    model = run_record.model_record(source.model)
    differing = differences({"model": model}, {"model": description["model"]}, resume_rules.rules_for(_MODEL_ALONE))
    try:
        settle(differing, where="the source")
    except MismatchError as error:
        raise MismatchError(
            "The source does not hold the configured model",
            found=error.found,
            fix="\nThe source sets these fields: omit their model.KEY=VALUE, or model= if it sets them.",
        ) from None
    train, batch = config.train, dict(description["batch"])
    del batch["micro_batch_size"]  # no iteration has used it, so a run may choose its own
    samples = source.consumed_samples if consumed_samples is None else consumed_samples
    if samples is None:
        samples = train.batch_sizes.consumed_after(source.iteration)
    most = (2**63 - 1) // train.seq_length  # tokens are counted in int64
    if not 0 <= samples <= most:
        raise ConfigError("The consumed sample count is out of range", expected=f"0 to {most}", found=samples)
    lr = schedule.at(source.iteration, samples) if source.iteration else 0.0  # the first iteration is 1
    progress = Progress(source.iteration, samples, samples * train.seq_length)
    assumed = {} if stated is None else {ASSUMED: _assumed(description, stated)}
    base = {} if source.base is None else {"base": source.base}
    return {
        **model_documents(config.model),
        STATE: progress.state_record(lr, {**description, "batch": batch, **base, **assumed}),
        RUN_CONFIG: run_config(config, with_commit=True),
        **_tokenizer(source, config),
    }


def _tokenizer(source: StateSource, config: Config) -> dict[str, bytes]:
    """Return the source's tokenizer files, the configured tokenizer's if it is another, or the byte tokenizer's if
    it fits.
    """
    if source.tokenizer and _has_no_other_tokenizer(config.data.tokenizer, source.tokenizer.get(TOKENIZER)):
        return {name: read_tokenizer(path) for name, path in source.tokenizer.items()}
    is_known = config.data.tokenizer is not None or config.model.vocab_size == bytes_encoder().vocab_size
    return tokenizer_of(config) if is_known else {}


def _has_no_other_tokenizer(tokenizer: str | None, beside: Path | None) -> bool:
    path = tokenizer_path(tokenizer)
    if path is None or beside is None:
        return tokenizer is None
    return read_tokenizer(path) == read_tokenizer(beside)


# Record sections whose values sources lack.
_SETTINGS = ("environment", "precision", "evaluation", "clip_grad", "seed", "schedule", *SECTIONS)
_MODEL_ALONE = CheckpointSection(finetune=True)
