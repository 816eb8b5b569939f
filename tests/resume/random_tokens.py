"""Token files of random samples, which a test tells apart by their tokens, and what a run reads of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import trainer.__main__
from tests.harness import around_iterations
from trainer.data.token_file import write_token_file
from trainer.run.build import Run

SIZES = {"a": 30, "b": 41, "c": 17}  # in samples
LENGTH, SEED = 16, 1234


def random_tokens() -> dict[str, np.ndarray[Any, Any]]:
    """Return the tokens of each file by its name, each of shape `[samples * LENGTH + 1]`."""
    rng = np.random.default_rng(3)
    return {name: rng.integers(0, 257, size * LENGTH + 1) for name, size in SIZES.items()}


def write_random_tokens(folder: Path) -> None:
    """Write the files `a.bin`, `b.bin` and `c.bin` of a vocabulary of 257 tokens."""
    for name, tokens in random_tokens().items():
        write_token_file(folder / f"{name}.bin", [tokens], dtype=np.uint16)


def train_and_note_windows(arguments: list[str]) -> None:
    """Train, and write the windows of each iteration that this rank reads into a file beside the run."""

    def note(run: Run, iteration: int) -> None:
        progress = run.state.progress.consumed_samples
        size = run.batch_schedule.at(progress)
        batches = run.train_data.train_batch(progress, SEED, size)
        with Path(run.config.run.dir).with_name(f"windows.{run.cluster.rank}").open("a") as file:
            for number, batch in zip(run.train_data.numbers_of(size), batches, strict=True):
                print(json.dumps([iteration, number, batch[:, :-1].tolist()]), file=file)

    around_iterations(before=note)
    trainer.__main__.main([f"run.dir={arguments[0]}", *arguments[1:]])


def windows_read(folder: Path) -> list[tuple[int, str, int]]:
    """Return the iteration, source and number of each sample that all ranks read, in order of global positions."""
    samples = {}
    for name, tokens in random_tokens().items():
        samples |= {tuple(tokens[n * LENGTH : (n + 1) * LENGTH].tolist()): (name, n) for n in range(SIZES[name])}
    lines = [json.loads(line) for path in folder.glob("windows.*") for line in path.read_text().splitlines()]
    ordered = sorted(lines, key=lambda line: line[:2])
    return [(iteration, *samples[tuple(window)]) for iteration, _, windows in ordered for window in windows]


def state(folder: Path, iteration: int) -> dict[str, object]:
    """Return the state of a checkpoint of a run."""
    path = folder / f"checkpoints/iter_{iteration:07d}/trainer_state.json"
    document: dict[str, object] = json.loads(path.read_text())
    return document
