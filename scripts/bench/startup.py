"""Measure the seconds from a launch to the first iteration: `python -m scripts.bench.startup [--ranks N ...] [--json]`.

A fresh run, a resumed run, and `import torch` with a rendezvous and nothing else take turns, each as a process (with
several ranks, a torchrun) of its own. The phases are those of the run's own record, which counts from the start of that
process; the other seconds count from outside, until a line is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.bench.bare_start import READY
from scripts.bench.machine import describe
from scripts.bench.tables import table

BARE, FRESH, RESUME = "import torch and rendezvous", "fresh", "resume"
_TO_BEGIN, _TO_END = "to the first iteration", "to its end"
_PHASES = ("torchrun", "imports", "rendezvous", "data", "build", "load")
_OVERRIDES = ("model=gpt2_tiny", "train.exit_interval=1", "train.train_iters=100000", "train.threads=1")
_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 120.0

Seconds = Mapping[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and return 0."""
    options = _parser().parse_args(arguments)
    measured: dict[tuple[int, str], list[Seconds]] = {}
    with tempfile.TemporaryDirectory(prefix="startup-") as name:
        folder = Path(name)
        for number in range(-1, options.rounds):  # the round before the first fills caches
            for ranks in options.ranks:
                for side, tree in _sides(options.tree):
                    seconds = measure(side.partition(",")[0], ranks, folder, tree=tree, overrides=options.overrides)
                    if number >= 0:
                        measured.setdefault((ranks, side), []).append(seconds)
        if options.json:
            rows = [{"ranks": ranks, "side": side, "rounds": rounds} for (ranks, side), rounds in measured.items()]
            print(json.dumps({"machine": describe(folder), "rows": rows}))
        else:
            print("\n".join([*describe(folder), *report(measured)]))
    return 0


def _sides(trees: Sequence[Path]) -> list[tuple[str, Path]]:
    """Return what starts in a round: its name, and the checkout whose trainer it is."""
    names = [f", {tree.name}" if len(trees) > 1 else "" for tree in trees]
    runs = [(f"{side}{name}", tree) for name, tree in zip(names, trees, strict=True) for side in (FRESH, RESUME)]
    return [(BARE, _ROOT), *runs]


def measure(side: str, ranks: int, folder: Path, *, tree: Path = _ROOT, overrides: Sequence[str] = ()) -> Seconds:
    """Start a side once, and return its seconds by name.

    Args:
        folder: the folder of runs. A fresh run replaces that of this number of ranks, a resume continues it.
        tree: the checkout whose trainer starts.

    Raises:
        SystemExit: if the process fails.
    """
    if side == BARE:
        return {_TO_BEGIN: _seconds_to_line(_command(ranks, "scripts.bench.bare_start"), READY, tree=_ROOT)}
    run = folder / str(ranks)
    if side == FRESH:
        shutil.rmtree(run, ignore_errors=True)
    command = [*_command(ranks, "trainer"), *_OVERRIDES, f"run.dir={run}", *overrides]
    seconds = {_TO_END: _seconds_to_line(command, "step ", tree=tree)}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    start = next((record["start"] for record in reversed(records) if "start" in record), None)
    if start is not None:  # an older tree records none
        seconds |= {_TO_BEGIN: start["seconds"], **{phase: start.get(phase, 0.0) for phase in _PHASES}}
    return seconds


def _command(ranks: int, module: str) -> list[str]:
    if ranks == 1:
        return [sys.executable, "-m", module]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*torchrun, "-m", module]


def _seconds_to_line(command: Sequence[str], beginning: str, *, tree: Path) -> float:
    """Start a command, and return the seconds until it prints a line with this beginning; then wait for its end."""
    # Without OMP_NUM_THREADS, torchrun sets it to this and prints a warning. Bytecode is kept, as Python does where the
    # environment does not turn it off: torch's was compiled when it was installed.
    variables = {"OMP_NUM_THREADS": "1"} if "--standalone" in command else {}
    variables = {**variables, **os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": ""}
    began, elapsed = time.perf_counter(), None
    with subprocess.Popen(
        command, cwd=tree, env=variables, text=True, start_new_session=True, stdout=subprocess.PIPE
    ) as process:
        killer = threading.Timer(_TIMEOUT_S, os.killpg, (process.pid, signal.SIGKILL))
        killer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if elapsed is None and line.startswith(beginning):
                    elapsed = time.perf_counter() - began
        finally:
            killer.cancel()
    if process.returncode or elapsed is None:
        raise SystemExit(f"bench_startup: {' '.join(command)} ended with status {process.returncode}")
    return elapsed


def report(measured: Mapping[tuple[int, str], Sequence[Seconds]]) -> list[str]:
    """Return the table: medians over rounds, in brackets the median of the ratio to the bare start of the round."""
    rows = []
    for (ranks, side), rounds in measured.items():
        bare = [seconds[_TO_BEGIN] for seconds in measured[ranks, BARE]]
        cells = []
        for name in (_TO_BEGIN, _TO_END, *_PHASES):
            values = [seconds[name] for seconds in rounds if name in seconds]
            cell = f"{statistics.median(values):.2f}" if values else "-"
            if values and name in (_TO_BEGIN, _TO_END):
                ratio = statistics.median(value / base for value, base in zip(values, bare, strict=True))
                cell += f" ({ratio:.2f})"
            cells.append(cell)
        rows.append([str(ranks), side, *cells])
    return table(["ranks", "start", _TO_BEGIN, _TO_END, *_PHASES], rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_startup", description="Measure the start of a run.")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further settings of the runs")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], metavar="N", help="numbers of ranks (1 and 2)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds, after one more (%(default)d)")
    parser.add_argument(
        "--tree", type=Path, nargs="+", default=[_ROOT], help="the checkouts whose trainers start (this one)"
    )
    parser.add_argument("--json", action="store_true", help="print the seconds of every round as one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
