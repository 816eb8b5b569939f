"""Checks single configuration values: their types, ranges and paths. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from operator import attrgetter
from types import NoneType
from typing import Any, get_args, get_origin

from reprise.errors import ConfigError
from reprise.storage import IS_URL, is_url
from reprise.stores import is_store_url, location
from trainer.config.schema import key_types
from trainer.parallel.topology import MOST_THREADS

# Keys that name a file or folder, or become part of a path.
_PATHS = (
    "run.name",
    "run.dir",
    "checkpoint.save",
    "checkpoint.local.dir",
    "checkpoint.mirror",
    "checkpoint.load",
    "checkpoint.base",
    "data.path",
    "data.tokenizer",
    "data.train",
    "data.valid",
    "data.cache",
)
# Path keys that may be, or must be, a store URL.
_MAY_BE_STORED = ("checkpoint.load", "checkpoint.mirror", "data.tokenizer")
_MUST_BE_STORED = ("checkpoint.mirror",)
_INT64 = 1 << 63
# Clocks, timers and torch's stores count small units in 64 bits: 19 years of minutes are enough.
_MOST_TIME = 1e7
_MOST_WINDOW = 10_000  # values in every checkpoint
_MOST_RANKS = 1 << 20  # in a dry run; torch takes less than 2^31

# Rules for numbers and list members that are not null, and the keys they hold for.
_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "at least 1",
        lambda value: value >= 1,
        """
        train.train_iters train.global_batch_size train.micro_batch_size train.max_micro_batch_size train.seq_length
        train.eval_iters train.max_rewinds train.dry_run_ranks parallel.tensor_model_parallel_size
        parallel.pipeline_model_parallel_size parallel.num_virtual_stages_per_pipeline_rank parallel.replicate
        checkpoint.file_bytes checkpoint.full_steps checkpoint.mirror_interval checkpoint.local.keep
        logging.log_interval schedule.lr_decay_iters schedule.lr_decay_samples schedule.lr_wsd_decay_iters
        schedule.lr_wsd_decay_samples
        """,
    ),
    (
        "0 or more",
        lambda value: value >= 0,
        """
        train.clip_grad train.seed train.eval_interval train.exit_interval
        train.exit_duration_in_mins optimizer.lr optimizer.weight_decay
        checkpoint.save_interval checkpoint.save_interval_mins checkpoint.max_checkpoint_keep checkpoint.keep_best
        checkpoint.save_retain_interval checkpoint.save_weights_interval checkpoint.save_steps checkpoint.weights_keep
        checkpoint.staging_bytes checkpoint.check_replicas checkpoint.exit_on_save_failure checkpoint.mirror_keep
        checkpoint.ckpt_step checkpoint.local.save_interval checkpoint.local.copies data.end_of_text
        schedule.lr_warmup_iters schedule.lr_warmup_samples
        """,
    ),
    ("above 0", lambda value: value > 0, "optimizer.adam_eps train.spike_factor"),
    (
        "at least 0 and below 1",
        lambda value: 0 <= value < 1,
        "optimizer.adam_beta1 optimizer.adam_beta2 optimizer.muon_momentum train.ema_decay",
    ),
    ("above 0 and below 1", lambda value: 0 < value < 1, "data.valid_fraction"),
    (
        f"above 0 and at most {_MOST_TIME:g}",
        lambda value: 0 < value <= _MOST_TIME,
        "train.distributed_timeout_minutes checkpoint.commit_timeout_s checkpoint.stall_timeout_s",
    ),
    (f"from 0 to {_MOST_TIME:g}", lambda value: 0 <= value <= _MOST_TIME, "checkpoint.mirror_wait_s"),
    ("0, 1, 2 or 3", lambda value: value in range(4), "parallel.zero_stage"),
    ("from 1 to 99", lambda value: 1 <= value < 100, "optimizer.muon_ns_steps"),
    (f"from 0 to {MOST_THREADS}", lambda value: 0 <= value <= MOST_THREADS, "train.threads"),
    (f"from 2 to {_MOST_WINDOW}", lambda value: 2 <= value <= _MOST_WINDOW, "train.spike_window"),
    (f"at most {_MOST_RANKS}", lambda value: value <= _MOST_RANKS, "train.dry_run_ranks"),
)


def value_problems(config: object) -> Iterator[str]:
    """List nonfinite numbers, integers beyond 64 signed bits, and sections and lists with another type's value.

    An interpolation may give a value of another type.
    """
    for key, value, kinds in _leaves(config):
        members = [get_args(kind)[0] for kind in kinds if get_origin(kind) is list]
        if value is None and NoneType in kinds:
            continue
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{key}={value}: must be a finite number"
        elif isinstance(value, int) and not -_INT64 <= value < _INT64:
            yield f"{key}={value}: must fit into a signed 64-bit integer"
        elif any(map(is_dataclass, kinds)) and not is_dataclass(value):
            yield f"{key}={value}: must be a section of keys"
        elif members and not (isinstance(value, list) and all(type(member) is members[0] for member in value)):
            yield f"{key}={value}: must be a list of {members[0].__name__}"


def range_problems(config: object) -> Iterator[str]:
    """List numbers outside their range."""
    for rule, holds, names in _RANGES:
        for key in names.split():
            value = attrgetter(key)(config)
            members = value if isinstance(value, list) else [value]
            if not all(holds(member) for member in members if member is not None):
                yield f"{key}={value}: must be {rule}"


def path_problems(config: object) -> Iterator[str]:
    """List paths that are empty, a URL, or not valid UTF-8."""
    for key, value, _ in _leaves(config):
        if not isinstance(value, str):
            continue
        if (escaped := value.encode(errors="backslashreplace").decode()) != value:
            yield f"{key}={escaped}: is not valid UTF-8"
        elif key in _PATHS and not value.strip():
            yield f"{key}={value}: is empty; omit it to use the default"
        elif key in _MUST_BE_STORED and not is_store_url(value):
            yield f"{key}={value}: must be a store URL, such as s3://bucket/run"
        elif key in _MAY_BE_STORED and is_store_url(value):
            try:
                location(value)
            except ConfigError as error:
                yield f"{key}: {error}"  # the error shows the URL without possible secrets
        elif key in _PATHS and is_url(value):
            yield f"{key}={value}: {IS_URL}"


def _leaves(config: object) -> Iterator[tuple[str, object, tuple[Any, ...]]]:
    """Yield every key, with its value and possible types. A section that is null, or no section, has no keys."""
    values = {"": config}
    for key, kinds in key_types().items():
        section, _, name = key.rpartition(".")
        if is_dataclass(values.get(section)):
            values[key] = getattr(values[section], name)
            yield key, values[key], kinds
