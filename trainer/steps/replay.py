"""Trains a run's iterations again, from a checkpoint or the start, and records what they compute."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from reprise.errors import DataError, TrainerError, count_of
from reprise.loading import open_checkpoint
from reprise.storage import FILE_SYSTEM, CheckpointFolder, integer, is_dir
from trainer.config.checks import validate
from trainer.config.compose import compose, read_resolved
from trainer.config.saved import FORMAT, flattened, saved_values
from trainer.config.schema import Config
from trainer.launch.environment import Environment
from trainer.metrics.json_lines import read_records
from trainer.metrics.launch_log import LAUNCHES

_FROM_FILE = ("checkpoint.base", "data.cache")
_START_KEYS = ("load", "finetune", "no_load_optim", "resize")


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """How a run trained an iteration, according to its folder.

    Args:
        ranks: The rank count of the launch that trained the iteration.
        settings: The launch's configuration values by dotted key, including `parallel` and the thread count.
        saved: The run's checkpoints with optimizer state, by iteration, in order. 0 is the start.
    """

    folder: Path
    ranks: int
    settings: Mapping[str, object]
    saved: Mapping[int, Path | None]


def read_run(folder: Path, iteration: int) -> RecordedRun:
    """Read how a run trained an iteration.

    Raises:
        DataError: The folder does not show it.
        TrainerError: The configuration has keys unknown to this version.
    """
    try:
        return _run_of(folder, iteration)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            "The run's folder does not show how it was trained",
            where=folder,
            found=f"{type(error).__name__}: {error}",
            fix="Its records are damaged, or an earlier version wrote them.",
        ) from error


def _run_of(folder: Path, iteration: int) -> RecordedRun:
    where = folder / LAUNCHES
    launches = [line for line in read_records(where) if line["event"] == "begin" and line["iteration"] < iteration]
    launch = launches[-1]
    settings = saved_values({"format": FORMAT, "config": launch.get("config")}, launch, where=where)
    sections, _ = read_resolved(folder / "config.yaml")
    values = flattened(sections)
    settings |= {key: values[key] for key in _FROM_FILE if key in values}
    environment = launch.get("environment", {})
    threads = environment.get("threads")
    settings["train.threads"] = threads[0] if isinstance(threads, list) else threads
    settings |= {f"environment.{name}": str(value) for name, value in environment.get("math", {}).items()}
    saved = _saved(folder, Path(str(values.get("checkpoint.save"))), before=iteration)
    if any(line["iteration"] == 0 for line in launches):
        start_values = {f"checkpoint.{key}": values[f"checkpoint.{key}"] for key in _START_KEYS}
        settings |= start_values | ({"checkpoint.load": "none"} if start_values["checkpoint.load"] == "auto" else {})
        saved = {0: None, **saved}
    return RecordedRun(folder, integer(launch["topology"]["world_size"]), settings, saved)


def _saved(folder: Path, save: Path, *, before: int) -> dict[int, Path | None]:
    """Return a run's checkpoints with optimizer state before an iteration, oldest first."""
    inner = folder / "checkpoints"
    checkpoints, saved = CheckpointFolder(inner if is_dir(inner) else save, FILE_SYSTEM), dict[int, Path | None]()
    for iteration in checkpoints.committed():
        path = checkpoints.iteration(iteration)
        try:
            if iteration < before and open_checkpoint(path, FILE_SYSTEM, may_lack=True).has_optimizer:
                saved[iteration] = path
        except TrainerError:  # skip a damaged checkpoint, as a start does
            continue
    return saved


def replay(folder: Path, first: int, last: int, out: Path, *, begin: int, values: Collection[str]) -> None:
    """Train a run from after iteration `first` to `last` and record it, as one of the launch's ranks.

    Args:
        out: The record folder. The run's own folder does not change.
        begin: The first recorded iteration.
        values: See `record_steps`.

    Raises:
        TrainerError: The iterations cannot be trained again here.
    """
    from trainer.launch import process_group
    from trainer.run.build import build
    from trainer.run.inputs import open_inputs
    from trainer.saves.targets import build_saves
    from trainer.start.decide import decide
    from trainer.start.fill import fill
    from trainer.steps.recorder import record_steps

    recorded = read_run(folder, last)
    if first not in recorded.saved:
        raise DataError(
            f"The run cannot be trained again from iteration {first}",
            where=folder,
            expected=f"a checkpoint with optimizer state: {', '.join(map(str, recorded.saved))}",
        )
    environment = Environment.read(os.environ)
    if environment.world_size != recorded.ranks:
        raise DataError(
            "The run can only be trained again on the same number of ranks",
            where=folder,
            expected=count_of(recorded.ranks, "rank"),
            found=f"{environment.world_size}",
        )
    config = _config(recorded, first, out)
    config = validate(config, environment.world_size)
    train, begin = config.train, max(begin, first + 1)
    cluster = process_group.start(train.device, deterministic=train.deterministic, threads=train.threads)
    try:
        with build_saves(config, cluster) as saves:
            start = decide(config, cluster, saves)
            run = build(config, cluster, inputs=open_inputs(config, cluster), saves=saves)
            fill(run, start)
            header = {"run": str(recorded.folder), "settings": recorded.settings, "begin": begin, "last": last}
            record_steps(run, out, header, begin=begin, last=last, values=values)
        process_group.final_barrier(cluster)
    finally:
        process_group.destroy(cluster)


def _config(recorded: RecordedRun, first: int, out: Path) -> Config:
    """Return the replay configuration: the run's, without saving and logging."""
    checkpoint, retained = recorded.saved[first], ["checkpoint.base", "checkpoint.file_bytes"]
    retained += [f"checkpoint.{key}" for key in _START_KEYS if checkpoint is None]
    values = {
        key: value
        for key, value in recorded.settings.items()
        if key in retained or key.partition(".")[0] not in ("checkpoint", "logging", "environment")
    }
    if checkpoint is not None:
        values |= {"checkpoint.load": str(checkpoint), "checkpoint.allow": ["all"]}
    values |= {
        "run.name": "compare-steps",
        "run.dir": str(out),
        "checkpoint.save": None,
        "train.on_spike": "off",
        "train.eval_interval": 0,
        "logging.tensorboard": False,
    }
    return compose(values=values)
