"""Uploads to an object store and loads from it, beside bare requests of obstore: `python -m scripts.bench.stores URL`.

The state is a model of linear layers with AdamW's moments. All sides use one store and take turns. The bare upload
sends the same files in parts of the same size. The bare download reads the same files in ranges of 4 MiB, as many at
once as a load. Figures are medians, and the median of the ratio of the same round.
"""

from __future__ import annotations

import argparse
import importlib.util
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
from reprise.savers import MirrorProcess, mirror_rule
from reprise.stores.client import PART_BYTES
from scripts.bench.store_sides import Seconds, peak_bytes
from scripts.bench.tables import table

_TIMEOUT_S = 600.0
_WIDTH = 1024
_BYTES_OF_LAYER = 3 * 4 * (_WIDTH * _WIDTH + _WIDTH)  # the weights and two moments in float32


_FINISH_S = 120.0
BASES = {  # of each side, what its rate is compared with
    "bare upload": "bare upload",
    "mirror": "bare upload",
    "DCP save, fsspec": "bare upload",
    "bare download": "bare download",
    "load": "bare download",
    "DCP load, fsspec": "bare download",
    "save": "save",
    "save with a mirror": "save",
    "blocked": "blocked",
    "blocked with a mirror": "blocked",
    "blocked, CPU": "blocked, CPU",
    "blocked, CPU with a mirror": "blocked, CPU",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="stores", description=__doc__)
    parser.add_argument("url", help="a folder of a store, which is emptied")
    parser.add_argument("--megabytes", type=int, default=512, help="size of the state (%(default)d)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which the sides take turns (%(default)d)")
    parser.add_argument("--saves", action="store_true", help="only the saves with and without a mirror")
    options = parser.parse_args(arguments)
    model, optimizer = _state(max(1, round(options.megabytes * 1e6 / _BYTES_OF_LAYER)))
    if options.saves:
        _print_saves(options.url, options.rounds, model, optimizer)
        return
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
        if importlib.util.find_spec("s3fs") is not None and options.url.startswith("s3://"):
            sides["DCP save, fsspec"] = lambda: _in_process("dcp_save", path, options.url)
            sides["DCP load, fsspec"] = lambda: _in_process("dcp_load", path, options.url)
        _in_process("empty", path, options.url)
        rounds, saves = [], _Saves(Path(name), f"{options.url}/saves", model, optimizer)
        for _ in range(options.rounds):
            _in_process("clear", path, options.url)
            rounds.append({side: call() for side, call in sides.items()} | saves.measure())
        saves.end()
        stored_bytes = _in_process("stored", path, options.url)["bytes"]
        idle_bytes = _in_process("idle", path, options.url)["bytes"]
        _in_process("empty", path, options.url)
    rows = [_row(rounds, side, base) for side, base in BASES.items() if side in rounds[0]]
    print(f"{options.url}: {total_bytes / 1e6:.0f} MB, {options.rounds} rounds, torch {torch.__version__}")
    print("\n".join(table(["side", "seconds", "rate / bare rate", "peak memory, MB"], rows)))
    print(f"bytes in the store / bytes on the disk: {stored_bytes / total_bytes:.5f}")
    uploader_bytes = max(figures["mirror"]["bytes"] for figures in rounds) - idle_bytes
    print(f"memory of the mirror beside that of an idle process: {uploader_bytes / PART_BYTES:.1f} parts")
    print(f"bytes read / bytes of the state: {statistics.median(reads.counts) / total_bytes:.4f}")


def _print_saves(url: str, count: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        saves = _Saves(Path(name), f"{url}/saves", model, optimizer)
        rounds = [saves.measure() for _ in range(count)]
        saves.end()
    rows = [_row(rounds, side, base) for side, base in BASES.items() if side in rounds[0]]
    print("\n".join(table(["side", "seconds", "rate / rate without", "peak memory, MB"], rows)))


class _Saves:
    """Saves of the same state into a folder with a mirror, which uploads meanwhile, and into one without.

    Where uploader and store share the cores, the CPU seconds of the calling thread tell what a mirror costs training.
    """

    def __init__(self, root: Path, url: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer, self._number = model, optimizer, 0
        self._folders = {"": root / "alone", " with a mirror": root / "mirrored"}
        self._mirror = MirrorProcess(root / "mirrored", mirror_rule(url, interval=0, keep=1))

    def measure(self) -> dict[str, Seconds]:
        """Return the seconds of a save, and of the part for which an asynchronous save blocks, by side."""
        figures = dict[str, Seconds]()
        for name, folder in self._folders.items():
            with reprise.AsyncSaver(folder, max_checkpoint_keep=2) as saver:
                for _ in range(2):  # the second while the mirror uploads the first
                    self._number += 1
                    start, begin = time.perf_counter(), time.thread_time()
                    saver.save(self._number, self._model, self._optimizer)
                    blocked, work = time.perf_counter() - start, time.thread_time() - begin
                    saver.wait()
                    seconds, begin = time.perf_counter() - start, time.thread_time()
                    if name:
                        self._mirror.wake()
                    work += time.thread_time() - begin
            figures[f"blocked, CPU{name}"] = {"seconds": work, "bytes": peak_bytes()}
            figures[f"save{name}"] = {"seconds": seconds, "bytes": peak_bytes()}
            figures[f"blocked{name}"] = {"seconds": blocked, "bytes": peak_bytes()}
        return figures

    def end(self) -> None:
        """Let the mirror upload what is saved, so that no part of a file stays behind, and end it."""
        self._mirror.finish(_FINISH_S)


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
    return [side, f"{seconds:.3g}", f"{ratio:.2f}", f"{peak / 1e6:.0f}"]


if __name__ == "__main__":
    main()
