"""Print the validation loss of checkpoints, one JSON line each: `reprise evaluate CHECKPOINT... [--set KEY=VALUE ...]`.

Evaluates as the trainer does, with the checkpoint's configuration overridden by the command's keys. With the run's own
batch, the loss equals the run's logged loss bit for bit. For several ranks, start it with `torchrun --no-python ...`.
The exit status is 0, or if the command fails 2, with several ranks 1.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from reprise.errors import ConfigError, TrainerError
from reprise.loading import Checkpoint, LoadSource, fill, no_folder, read_places
from reprise.storage import FILE_SYSTEM, Json, dumps, exists, shown_name
from reprise.tensors import LiveTensor
from trainer.commands.arguments import any_path, local_path
from trainer.commands.frame import FINE, framed
from trainer.config.checkpoint import CheckpointSection
from trainer.config.checks import validate
from trainer.config.compose import compose
from trainer.config.load_saved import find_saved
from trainer.config.optimizer import OptimizerName
from trainer.config.saved import RUN_CONFIG
from trainer.config.schema import Config
from trainer.data.section import TOKEN_KINDS, DataKind
from trainer.launch.environment import Environment
from trainer.launch.exit_with_error import exit_with_error

if TYPE_CHECKING:
    from trainer.launch.process_group import Cluster
    from trainer.run.build import Run

_LEFT_OUT = ("checkpoint", "logging")  # sections without use here
_FIXED = {
    "run.name": "evaluate",
    "checkpoint.save": None,
    "train.eval_interval": 1,
    "train.on_spike": "off",
    "train.ema_decay": 0.0,
    "logging.tensorboard": False,
}
_log = logging.getLogger(__name__)


def evaluate(options: argparse.Namespace) -> int:
    """Evaluate the checkpoints on the command line."""
    environment = Environment.read(os.environ)
    try:
        _evaluate_all(options, environment.world_size)
    except (TrainerError, OSError) as error:
        if environment.world_size > 1:
            exit_with_error(error, environment)
        raise
    return FINE


def _evaluate_all(options: argparse.Namespace, world_size: int) -> None:
    """Print each checkpoint's line on rank 0. Equally configured checkpoints share a model. Call on all ranks."""
    from trainer.launch import process_group
    from trainer.run.build import build
    from trainer.run.inputs import open_inputs
    from trainer.saves.targets import build_saves

    cluster: Cluster | None = None
    run: Run | None = None
    for path in options.checkpoints:
        config = _config(path, options, world_size)
        train = config.train
        if cluster is None:
            cluster = process_group.start(train.device, deterministic=train.deterministic, threads=train.threads)
        if run is None or run.config != config:
            run = None
            gc.collect()  # modules and their hooks form reference cycles
            inputs = open_inputs(config, cluster, is_evaluation=True)
            run = build(config, cluster, inputs=inputs, saves=build_saves(config, cluster))
        line = _evaluate(run, path, averages=options.ema)
        if cluster.rank == 0:
            print(dumps(line), flush=True)
    if cluster is not None:
        process_group.shutdown(cluster)


def _config(path: Path, options: argparse.Namespace, world_size: int) -> Config:
    """Return the configuration for a checkpoint: its run's, overridden by the command, and without optimizer state.

    The model's parallel sizes are the run's if they divide the world size, and otherwise 1.

    Raises:
        ConfigError: The checkpoint has no configuration, or it cannot run here.
    """
    if not exists(path):
        raise no_folder(path, kind="checkpoint")
    saved = find_saved(path, iteration=None, save=None, files=FILE_SYSTEM)
    if saved is None:
        raise ConfigError(
            "The checkpoint has no configuration",
            where=path,
            expected=f"a checkpoint of `reprise train`, or its run, with {RUN_CONFIG}",
        )
    values = {key: value for key, value in saved.values.items() if key.partition(".")[0] not in _LEFT_OUT}
    if options.data:
        is_kept = DataKind(values["data.kind"]) in TOKEN_KINDS - {DataKind.module}
        kind = values["data.kind"] if is_kept else DataKind.token_file.value
        paths = list(map(str, options.data))
        values |= {"data.kind": kind, "data.path": None, "data.train": paths[0], "data.valid": paths}
    model_ranks = [f"parallel.{axis}_model_parallel_size" for axis in ("tensor", "pipeline")]
    tensor, pipeline = (int(str(values.get(key, 1))) for key in model_ranks)
    if world_size % (tensor * pipeline):
        values = {key: value for key, value in values.items() if not key.startswith("parallel.")} | {
            key: values[key] for key in ("parallel.zero_stage", "parallel.invariant_ranks") if key in values
        }
    config = compose(options.overrides, {**values, **_FIXED, "parallel.replicate": 1})
    if config.data.kind in TOKEN_KINDS and config.data.valid is None:
        raise ConfigError(
            "The checkpoint's run has no validation data", where=saved.path, fix="Pass token files with --data."
        )
    config = validate(config, world_size)
    frozen = [] if config.model.is_adapted else ["*"]  # frozen parameters have no moments
    optimizer = replace(config.optimizer, name=OptimizerName.adamw)
    return replace(config, train=replace(config.train, freeze=frozen), optimizer=optimizer)


def _evaluate(run: Run, path: Path, *, averages: bool) -> Json:
    """Fill a run with a checkpoint's weights, or their averages, and return the result line. Call on all ranks."""
    from trainer.interop.source import require_averages
    from trainer.start.base import load_base, require_base
    from trainer.start.fill import rebind
    from trainer.start.source import Checkpoints, Part
    from trainer.training.evaluate import evaluate

    source = Checkpoints(LoadSource.named(path))
    section = CheckpointSection(finetune=True)
    base = load_base(run) if run.config.model.is_adapted else None

    def refuse(checkpoint: Checkpoint) -> None:
        if averages:
            require_averages(checkpoint)
        if base is not None:
            require_base(checkpoint, base)

    part = Part("", run.config.model, partial(run.state.shards, with_optimizer=False), section, refuse)
    _, restored = source.fill(run, part)
    assert restored is not None
    checkpoint = restored.checkpoint
    if averages:
        with run.cluster.channel.agreed("averages"):
            _fill_averages(run, checkpoint)
    rebind(run)
    loss, name = evaluate(run), "ema_loss" if averages else "valid_loss"
    assert loss is not None
    data, saved_data = run.description["data"]["valid_fingerprint"], checkpoint.state.get("data", {})
    if run.cluster.rank == 0 and saved_data.get("valid_fingerprint", data) != data:
        _log.warning(f"{shown_name(checkpoint.path)}: the validation data differs from the run's")
    where = {"checkpoint": str(checkpoint.path), "iteration": checkpoint.iteration}
    samples = run.config.train.eval_iters * run.config.train.global_batch_size
    return {**where, name: loss, f"{name}_hex": loss.hex(), "samples": samples, "data": data}


def _fill_averages(run: Run, checkpoint: Checkpoint) -> None:
    """Fill this rank's parameters with their moving averages, where these exist."""
    from trainer.optim.table import AVERAGE

    places, live = read_places(checkpoint), list[LiveTensor]()
    for tensor in run.state.shards(with_optimizer=False):
        if (name := f"{AVERAGE}.{tensor.spec.name}") in places:
            live.append(replace(tensor, spec=replace(tensor.spec, name=name)))
    fill(checkpoint, live)
    checkpoint.files.end()


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "reprise evaluate CHECKPOINT... [--data FILE...] [--ema] [--set KEY=VALUE ...]"
    where = "a run for its newest checkpoint, an iter_ folder, or a URL of these"
    parser.add_argument("checkpoints", type=any_path, nargs="+", metavar="CHECKPOINT", help=where)
    parser.add_argument(
        "--data",
        type=local_path,
        nargs="+",
        metavar="FILE",
        help="token files to use instead of the run's validation data",
    )
    parser.add_argument("--ema", action="store_true", help="evaluate the moving averages instead of the weights")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
        help="configuration keys, as for `reprise train`",
    )


main = framed(evaluate, _add_arguments)
