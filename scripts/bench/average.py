"""Measures what moving averages of the parameters add to an iteration: `python -m scripts.bench.average KEY=VALUE ...`.

A run with averages trains; after each iteration, the averages are moved once more by nothing. CPU seconds count, so
other programs disturb little.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from reprise.files import FILE_SYSTEM
from trainer.config.compose import compose
from trainer.launch import process_group
from trainer.launch.process_group import Cluster
from trainer.optim.average import move_averages
from trainer.run.build import Run, build
from trainer.run.inputs import open_inputs
from trainer.run.saves import build_saves
from trainer.start.decide import decide
from trainer.start.fill import fill
from trainer.training.loop import iterate

_ROUNDS = 15


def main(overrides: Sequence[str]) -> None:
    """Print the median ratio of an iteration's CPU seconds with and without the averages."""
    cluster = process_group.start("cpu", deterministic=False)
    with TemporaryDirectory() as folder:
        run = _run([*overrides, "train.ema_decay=0.999"], cluster, Path(folder))
        optimizers = [part.optimizer for part in run.state.parts]
        seconds = [(_cpu_seconds(lambda: iterate(run)), _moved(optimizers)) for _ in range(_ROUNDS + 1)][1:]
    ratios = sorted(total / (total - averages) for total, averages in seconds)
    print(
        f"{_ROUNDS} iterations of {median(s for s, _ in seconds) * 1e3:.1f} ms of CPU, averages "
        f"{median(s for _, s in seconds) * 1e3:.2f} ms; with / without: median {median(ratios):.3f}, "
        f"quartiles {ratios[_ROUNDS // 4]:.3f} and {ratios[-1 - _ROUNDS // 4]:.3f}"
    )


def _run(overrides: Sequence[str], cluster: Cluster, folder: Path) -> Run:
    paths = [f"run.dir={folder}", "checkpoint.save=null", "checkpoint.load=none"]
    config = compose([*overrides, *paths])
    saves = build_saves(config, cluster, FILE_SYSTEM)
    start = decide(config, cluster, saves)
    return fill(build(config, cluster, inputs=open_inputs(config, cluster), saves=saves), start)


def _moved(optimizers: Sequence[torch.optim.Optimizer]) -> float:
    def move() -> None:
        for optimizer in optimizers:
            move_averages(0.0, optimizer)

    return _cpu_seconds(move)


def _cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


if __name__ == "__main__":
    main(sys.argv[1:])
