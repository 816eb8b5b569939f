"""Uploads to an object store and loads from it, beside bare requests of obstore: `python -m scripts.bench.stores URL`.

The state is a model of linear layers with AdamW's moments. All sides use one store and take turns. The bare upload
sends the same files in parts of the same size. The bare download reads the same files in ranges of 4 MiB, as many at
once as a load. Figures are medians, and the median of the ratio of the same round.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

import reprise
from scripts.bench.store_sides import Seconds, peak_bytes
from scripts.bench.tables import table

_TIMEOUT_S = 600.0
_WIDTH = 1024
_BYTES_OF_LAYER = 3 * 4 * (_WIDTH * _WIDTH + _WIDTH)  # the weights and two moments in float32


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="stores", description=__doc__)
    parser.add_argument("url", help="a folder of a store, which is emptied")
    parser.add_argument("--megabytes", type=int, default=512, help="size of the state (%(default)d)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which the sides take turns (%(default)d)")
    options = parser.parse_args(arguments)
    model, optimizer = _state(max(1, round(options.megabytes * 1e6 / _BYTES_OF_LAYER)))
    reads = _Reads()
    logging.getLogger("reprise.stores.reader").addHandler(reads)
    logging.getLogger("reprise.stores.reader").setLevel(logging.INFO)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        path = reprise.save(Path(name) / "run", model, optimizer, iteration=1)
        total_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        sides: dict[str, Callable[[], Seconds]] = {
            "bare upload": lambda: _in_process("bare_upload", path, options.url),
            "mirror": lambda: _in_process("mirror", path, options.url),
            "bare download": lambda: _in_process("bare_download", path, options.url),
            "load": lambda: _load(f"{options.url}/run", model, optimizer),
        }
        rounds = []
        for _ in range(options.rounds):
            _in_process("clear", path, options.url)
            rounds.append({side: call() for side, call in sides.items()})
        stored_bytes = _in_process("stored", path, options.url)["bytes"]
        _in_process("clear", path, options.url)
    bases = ["bare upload", "bare upload", "bare download", "bare download"]
    rows = [_row(rounds, side, base) for side, base in zip(sides, bases, strict=True)]
    print(f"{options.url}: {total_bytes / 1e6:.0f} MB, {options.rounds} rounds, torch {torch.__version__}")
    print("\n".join(table(["side", "seconds", "rate / bare rate", "peak memory, MB"], rows)))
    print(f"bytes in the store / bytes on the disk: {stored_bytes / total_bytes:.5f}")
    print(f"bytes read / bytes of the state: {statistics.median(reads.counts) / total_bytes:.4f}")


class _Reads(logging.Handler):
    """The bytes that each load has read of the store."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        match = re.match(r"read (\d+) bytes of", record.getMessage())
        if match is not None:
            self.counts.append(int(match[1]))


def _state(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def _load(url: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Seconds:
    start = time.perf_counter()
    reprise.load(url, model, optimizer)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "bytes": peak_bytes()}


def _in_process(side: str, path: Path, url: str) -> Seconds:
    command = [sys.executable, "-m", "scripts.bench.store_sides", side, str(path), url]
    result = subprocess.run(command, stdout=subprocess.PIPE, timeout=_TIMEOUT_S, check=True)
    measured: Seconds = json.loads(result.stdout)
    return measured


def _row(rounds: Sequence[dict[str, Seconds]], side: str, base: str) -> list[str]:
    ratio = statistics.median(figures[base]["seconds"] / figures[side]["seconds"] for figures in rounds)
    seconds = statistics.median(figures[side]["seconds"] for figures in rounds)
    peak = max(figures[side]["bytes"] for figures in rounds)
    return [side, f"{seconds:.2f}", f"{ratio:.2f}", f"{peak / 1e6:.0f}"]


if __name__ == "__main__":
    main()
