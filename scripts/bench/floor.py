"""Measure what an iteration costs beside its passes and its step: `python -m scripts.bench.floor [--json]`.

A model of one tiny layer trains on one rank with a feature at a time. From the host's time of an iteration the forward
and backward pass and the optimizer's step are taken off; what is left is the floor, and its parts are named. The time
is the thread's on a processor, without the turns of other programs; a single rank waits for no other.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.random import default_rng

import trainer.training.step as step_module
from reprise.files import FILE_SYSTEM
from scripts.bench.gpt2 import gpt2_config
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
from trainer.run.build import build
from trainer.run.inputs import open_inputs
from trainer.run.saves import build_saves
from trainer.training.loop import iterate

BATCH, TOKENS = 2, 1 << 14
PASSES, UPDATE, DATA, FIGURES = "passes", "update", "data", "figures"
FEATURES: Mapping[str, Callable[[Config], Config]] = {
    "plain": lambda config: config,
    "invariant_ranks=1": lambda config: replace(config, parallel=ParallelSection(invariant_ranks=1)),
    "no clipping": lambda config: replace(config, train=replace(config.train, clip_grad=0.0)),
}


def rows(iterations: int = 200) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of an iteration and its parts, by feature; `floor` is all but passes and step."""
    with tempfile.TemporaryDirectory() as folder:
        write_token_file(Path(folder) / "train.bin", [default_rng(1).integers(64, size=TOKENS)], dtype=np.uint32)
        return {name: _measured(change(_config(Path(folder))), iterations) for name, change in FEATURES.items()}


def _config(folder: Path) -> Config:
    train = TrainSection(micro_batch_size=BATCH, global_batch_size=BATCH, seq_length=16, threads=1, eval_interval=0)
    return Config(
        gpt2_config(1, 1, 16, 64),
        run=RunSection(dir=str(folder / "run")),
        data=DataSection(kind=DataKind.token_file, train=str(folder / "train.bin")),
        train=train,
        optimizer=OptimizerSection(lr=1e-3),
        checkpoint=CheckpointSection(save=None),
        logging=LoggingSection(tensorboard=False),
    )


def _measured(config: Config, iterations: int) -> dict[str, float]:
    cluster = launch.start("cpu", deterministic=False, threads=1, variables={})
    run = build(config, cluster, inputs=open_inputs(config, cluster), saves=build_saves(config, cluster, FILE_SYSTEM))
    (part,) = run.state.parts
    places: list[tuple[Any, str, str]] = [
        (step_module, "forward_backward", PASSES),
        (step_module, "reduce_figures", FIGURES),
        (part.optimizer, "step", UPDATE),
        (type(run.train_data), "train_batch", DATA),
    ]
    samples = defaultdict[str, list[float]](list)
    with _timed(places, samples):
        for _ in range(iterations):
            start = time.thread_time()
            iterate(run)
            samples["iteration"].append(time.thread_time() - start)
    columns = samples["iteration"], samples[PASSES], samples[UPDATE], samples[DATA], samples[FIGURES]
    for total, passes, update, data, figures in zip(*columns, strict=True):
        samples["floor"].append(total - passes - update)
        samples["other"].append(total - passes - update - data - figures)
    return {name: 1e3 * median(values[iterations // 10 :]) for name, values in samples.items()}


@contextmanager
def _timed(places: Sequence[tuple[Any, str, str]], samples: Mapping[str, list[float]]) -> Iterator[None]:
    """Add the seconds of each call of the named functions to their samples."""

    def timing(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            start = time.thread_time()
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or a line of JSON for each feature, and return 0."""
    parser = argparse.ArgumentParser(prog="bench_floor", description="Measure an iteration beside its passes and step.")
    parser.add_argument("--iterations", type=int, default=200, metavar="N", help="of each feature (%(default)d)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per feature")
    options = parser.parse_args(arguments)
    table = rows(options.iterations)
    if options.json:
        for name, row in table.items():
            print(json.dumps({"feature": name, **row}))
        return 0
    columns = ["floor", DATA, FIGURES, "other", PASSES, UPDATE, "iteration"]
    lines = [[name, *(f"{row[column]:.3f}" for column in columns)] for name, row in table.items()]
    print("\n".join(["milliseconds, medians", *format_table([["feature", *columns], *lines], align=">")]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
