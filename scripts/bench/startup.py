"""The seconds from the launch of a tiny run to its first iteration, beside a process that only imports torch.

A fresh run, a resumed run and the bare start take turns, each as a process (with several ranks, a torchrun) of its own.
The phases are those of the run's own record; the seconds count from outside, until a line is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from scripts.bench.harness import Figures, Goal, report, take_turns
from scripts.faults.ranks import launcher

BARE, FRESH, RESUME = "import torch and rendezvous", "fresh", "resume"
_TO_BEGIN = "first iteration, s"
_READY, _STARTED = "ready", "started in "
_BARE_START = f"""
import os
import torch.distributed as dist
if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
    dist.barrier()
print("{_READY}", flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
"""
_PHASES = ("imports", "rendezvous", "data", "build", "load")
_OVERRIDES = ("model=gpt2_tiny", "train.exit_interval=1", "train.train_iters=100000", "train.threads=1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subject."""
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further settings of the runs")
    parser.add_argument("--of", type=int, nargs="+", default=[1, 2], metavar="N", help="numbers of ranks (1 and 2)")


def measure(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return a table for each number of ranks."""
    lines = []
    (folder / "bare.py").write_text(_BARE_START)
    for ranks in options.of:
        start = partial(_start, ranks=ranks, folder=folder, overrides=options.overrides)
        sides = {side: partial(start, side) for side in (BARE, FRESH, RESUME)}
        rows = take_turns(sides, options.rounds, warm_up=1)  # which fills caches, and leaves a run to resume
        bound = 1.3 if ranks == 1 else 1.4
        goals = [Goal(f"{side}, {ranks} ranks", side, _TO_BEGIN, BARE, bound) for side in (FRESH, RESUME)]
        lines += [*report(rows, BARE, goals), ""]
    return lines


def _start(side: str, *, ranks: int, folder: Path, overrides: Sequence[str]) -> Figures:
    """Start a side; a fresh run replaces that of this number of ranks, a resume goes on with it."""
    command = launcher(ranks)
    if side == BARE:
        return {_TO_BEGIN: _seconds_to_line([*command, str(folder / "bare.py")], _READY)}
    run = folder / str(ranks)
    if side == FRESH:
        shutil.rmtree(run, ignore_errors=True)
    seconds = _seconds_to_line([*command, "-m", "trainer", *_OVERRIDES, f"run.dir={run}", *overrides], _STARTED)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    start = next(record["start"] for record in reversed(records) if "start" in record)
    return {_TO_BEGIN: seconds, **{phase: start[phase] for phase in _PHASES}}


def _seconds_to_line(command: Sequence[str], beginning: str) -> float:
    """Start a command, and return the seconds until it prints a line with this beginning; then wait for its end."""
    # Without OMP_NUM_THREADS, torchrun sets it to this and prints a warning. Bytecode is kept, as Python does where the
    # environment does not turn it off.
    variables = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    start, elapsed = time.perf_counter(), None
    with subprocess.Popen(command, env=variables, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if elapsed is None and line.startswith(beginning):
                elapsed = time.perf_counter() - start
    if process.returncode or elapsed is None:
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
    return elapsed
