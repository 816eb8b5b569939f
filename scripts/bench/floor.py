"""Measure what an iteration costs beside its passes and its step: `python -m scripts.bench.floor [--ranks N] [--json]`.

A model of one tiny layer trains with a feature at a time, in the trainer's loop, with log and `metrics.jsonl`. From the
host's time of an iteration the passes, the reduction of gradients and the optimizer's step are taken off; what is left
is the floor, and its parts are named. The time is that of rank 0's thread on a processor, without waits and the turns
of other programs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.random import default_rng

import trainer.training.step as step_module
from models import families
from reprise.files import FILE_SYSTEM
from scripts.bench.gpt2 import gpt2_config
from scripts.faults.ranks import run_ranks
from trainer.commands.arguments import positive
from trainer.compare.text_table import format_table
from trainer.config.checkpoint import CheckpointSection
from trainer.config.logging import LoggingSection
from trainer.config.optimizer import OptimizerSection
from trainer.config.parallel import ParallelSection
from trainer.config.run import RunSection
from trainer.config.schema import Config
from trainer.config.train import TrainSection
from trainer.data.section import DataKind, DataSection
from trainer.data.token_file import write_token_file
from trainer.launch import process_group as launch
from trainer.metrics.run_log import RunLog
from trainer.run.build import Run, build, build_log
from trainer.run.inputs import open_inputs
from trainer.run.random import fill_initial_values
from trainer.run.saves import build_saves
from trainer.training import loop

BATCH, TOKENS = 2, 1 << 14
TAKEN_OFF = PASSES, GRADIENTS, UPDATE = "passes", "gradients", "update"
PARTS = DATA, FIGURES, LOG = "data", "figures", "log"
FEATURES: Mapping[str, Callable[[Config], Config]] = {
    "plain": lambda config: config,
    "invariant_ranks": lambda config: replace(
        config, parallel=ParallelSection(invariant_ranks=config.train.global_batch_size // BATCH)
    ),
    "no line of the log": lambda config: replace(config, logging=replace(config.logging, log_interval=1 << 20)),
    "no clipping": lambda config: replace(config, train=replace(config.train, clip_grad=0.0)),
}
_TIMEOUT_S = 600.0

Samples = Mapping[str, list[float]]


def rows(features: Sequence[str] = tuple(FEATURES), iterations: int = 200) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of an iteration and its parts, by feature; `floor` is all but `TAKEN_OFF`.

    A call of all ranks that torchrun's variables name; several ranks have a launch for each feature.
    """
    cluster = launch.start("cpu", deterministic=False, threads=1)
    with tempfile.TemporaryDirectory() as folder, _logging_to_nowhere():
        write_token_file(Path(folder) / "train.bin", [default_rng(1).integers(64, size=TOKENS)], dtype=np.uint32)
        config = _config(Path(folder), iterations, cluster.world_size)
        table = {name: _measured(FEATURES[name](config), cluster) for name in features}
    launch.shutdown(cluster)
    return table


def _config(folder: Path, iterations: int, ranks: int) -> Config:
    train = TrainSection(
        train_iters=iterations + 1,  # the last ends at no begin of another
        micro_batch_size=BATCH,
        global_batch_size=BATCH * ranks,
        seq_length=16,
        threads=1,
        eval_interval=0,
    )
    return Config(
        gpt2_config(1, 1, 16, 64),
        run=RunSection(dir=str(folder / "run")),
        data=DataSection(kind=DataKind.token_file, train=str(folder / "train.bin")),
        train=train,
        optimizer=OptimizerSection(lr=1e-3),
        checkpoint=CheckpointSection(save=None),
        logging=LoggingSection(tensorboard=False),
    )


def _measured(config: Config, cluster: launch.Cluster) -> dict[str, float]:
    run = build(config, cluster, inputs=open_inputs(config, cluster), saves=build_saves(config, cluster, FILE_SYSTEM))
    fill_initial_values(
        run.state.shards(with_optimizer=False), families.initial_values(config.model), config.train.seed
    )
    logs = (_opened(build_log(run)),) if cluster.rank == 0 else ()
    samples = _samples(replace(run, logs=logs))
    for log in logs:
        log.close()
    count = len(samples["floor"])
    return {name: 1e3 * median(values[count // 10 : count]) for name, values in samples.items()}


def _opened(log: RunLog) -> RunLog:
    log.open(0, "")
    return log


def _samples(run: Run) -> Samples:
    """Train a run to its end; return the seconds of its iterations, of their parts, and of the floor."""
    (part,) = run.state.parts
    places: list[tuple[Any, str, str]] = [
        (step_module, "forward_backward", PASSES),
        (type(run.context.reduction), "finish", GRADIENTS),
        (part.optimizer, "step", UPDATE),
        (type(run.train_data), "train_batch", DATA),
        (step_module, "reduce_figures", FIGURES),
        (loop, "_record", LOG),
        (loop, "iterate", "iterate"),
    ]
    samples, begins = defaultdict[str, list[float]](list), list[float]()
    with _timed(places, samples, begins):
        loop.train(run)
    for number, (begin, end) in enumerate(pairwise(begins)):
        samples["iteration"].append(end - begin)
        samples["floor"].append(end - begin - sum(samples[name][number] for name in TAKEN_OFF))
        samples["other"].append(samples["floor"][-1] - sum(samples[name][number] for name in PARTS))
    return samples


@contextmanager
def _timed(places: Sequence[tuple[Any, str, str]], samples: Samples, begins: list[float]) -> Iterator[None]:
    """Add the seconds of each call of the named functions to their samples, and the begins of iterations."""

    def timing(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            start = time.thread_time()
            if name == "iterate":
                begins.append(start)
            result = call(*arguments, **keywords)
            samples[name].append(time.thread_time() - start)
            return result

        return timed

    originals = [(place, attribute, getattr(place, attribute)) for place, attribute, _ in places]
    try:
        for place, attribute, name in places:
            setattr(place, attribute, timing(getattr(place, attribute), name))
        yield
    finally:
        for place, attribute, original in originals:
            setattr(place, attribute, original)


@contextmanager
def _logging_to_nowhere() -> Iterator[None]:
    """Format the lines of the log, as a run does, and write them to the null device."""
    root = logging.getLogger()
    with open(os.devnull, "w") as null:
        handler, level = logging.StreamHandler(null), root.level
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        try:
            yield
        finally:
            root.setLevel(level)
            root.removeHandler(handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or a line of JSON for each feature, and return 0."""
    parser = argparse.ArgumentParser(prog="bench_floor", description="Measure an iteration beside its passes and step.")
    parser.add_argument("--iterations", type=positive, default=200, metavar="N", help="of each feature (%(default)d)")
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="processes that share the batch (%(default)d)"
    )
    parser.add_argument("--features", nargs="+", default=[*FEATURES], choices=FEATURES, help="all by default")
    parser.add_argument("--json", action="store_true", help="print one JSON object per feature")
    options = parser.parse_args(arguments)
    if options.ranks > 1:
        form = ["--json"] if options.json else []
        for name in options.features:
            command = [sys.executable, "-m", "scripts.bench.floor", "--iterations", str(options.iterations), *form]
            run_ranks([*command, "--features", name], options.ranks, timeout_s=_TIMEOUT_S)
        return 0
    table = rows(options.features, options.iterations)
    if int(os.environ.get("RANK", "0")) == 0:
        print("\n".join(_lines(table, is_json=options.json)))
    return 0


def _lines(table: Mapping[str, Mapping[str, float]], *, is_json: bool) -> list[str]:
    if is_json:
        return [json.dumps({"feature": name, **row}) for name, row in table.items()]
    columns = ["floor", *PARTS, "other", *TAKEN_OFF, "iteration"]
    lines = [[name, *(f"{row[column]:.3f}" for column in columns)] for name, row in table.items()]
    return ["milliseconds, medians", *format_table([["feature", *columns], *lines], align=">")]


if __name__ == "__main__":
    sys.exit(main())
