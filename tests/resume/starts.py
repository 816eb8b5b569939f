"""The run that many tests look at, and starts in this process, up to the first iteration."""

from __future__ import annotations

from pathlib import Path

import torch

from reprise.ranks import single_rank_channel
from tests.harness import TINY, built, compose, filled
from trainer.config.checks import validate
from trainer.launch.process_group import Cluster
from trainer.run.build import Run

REFERENCE = (
    "model=gpt2_tiny",
    *TINY,
    "train.train_iters=8",
    "train.eval_interval=4",
    "train.eval_iters=1",
    "schedule.lr_decay_iters=20",
    "checkpoint.save_interval=2",
    "logging.tensorboard=true",
)


def start(folder: Path, *overrides: str, threads: int = 1) -> Run:
    """Return the run of a command after its start, in this process; it holds no lock and trains nothing."""
    config = compose([*overrides, f"run.dir={folder}"])
    validate(config, 1)
    run = built(config, Cluster(0, 1, torch.device("cpu"), threads, single_rank_channel(), "test"))
    with run.saves:
        return filled(run)
