"""Train on one rank, train again and get killed, resume twice on two ranks, and compare the two curves.

The first resume is tensor parallel, the second data parallel.

It needs what `pip install '.[train]'` installs. With `plot` and `report` it also draws a picture and a page.

The exit status is 0 if the two loss curves have equal bits, else not 0.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from reprise.errors import TrainerError
from trainer.commands.arguments import local_path
from trainer.commands.report import write_report
from trainer.compare.curves import compare, report
from trainer.compare.figure import write_figure
from trainer.compare.plot import draw_comparisons
from trainer.compare.read import read_curve

KILL_AFTER = 49
MOVE_AFTER = 80
# With `invariant_ranks` of the experiment: the same bits at tensor parallelism too.
SHARDS = ("parallel.invariant_tensor_ranks=2", "model.pad_vocab_multiple=2")
ONE_RANK = (sys.executable, "-m", "trainer")
TWO_RANKS = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "trainer")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=local_path, default=Path("runs/demo"), help="deleted first, then created")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="of the configuration of both runs")
    options = parser.parse_args(arguments)
    folder, overrides = options.folder, ["experiment=demo", *SHARDS, *options.overrides]
    shutil.rmtree(folder, ignore_errors=True)
    unbroken, killed = folder / "unbroken", folder / "killed"
    say("1. a run of 100 iterations on one rank, undisturbed")
    subprocess.run([*ONE_RANK, *overrides, f"run.dir={unbroken}"], check=True)
    say(f"2. the same in another folder, killed (SIGKILL) inside iteration {KILL_AFTER + 1}")
    last = kill_inside_iteration([*ONE_RANK, *overrides, f"run.dir={killed}"], killed / "metrics.jsonl")
    resumed = [*TWO_RANKS, *overrides, f"run.dir={killed}", "checkpoint.reshard=true"]
    say(f"3. the killed run is resumed on two tensor-parallel ranks, up to iteration {MOVE_AFTER}")
    subprocess.run([*resumed, "parallel=tp2_sp", f"train.exit_interval={MOVE_AFTER}"], check=True)
    say("4. and from there on two data-parallel ranks")
    subprocess.run(resumed, check=True)
    say("5. both curves compared")
    return compare_runs(unbroken, killed, last, folder / "overlay.png")


def kill_inside_iteration(run: Sequence[str], metrics: Path) -> int:
    """Start a run, kill it with SIGKILL halfway through the iteration after `KILL_AFTER`; return the last recorded."""
    process = subprocess.Popen(run)
    try:
        while not (rows := training_rows(metrics)) or rows[-1]["iteration"] < KILL_AFTER:
            if process.poll() is not None:
                raise SystemExit(f"the run ended before it could be killed, status {process.returncode}")
            time.sleep(0.005)
        time.sleep(0.5 * rows[-1]["seconds"])
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    last = int(training_rows(metrics)[-1]["iteration"])
    say(f"   killed, the last recorded iteration is {last}")
    return last


def compare_runs(unbroken: Path, killed: Path, last: int, picture: Path) -> int:
    """Print the comparison of both curves, draw it if it can be, and return 0 if they have equal bits.

    Args:
        last: the last iteration recorded before the kill.
    """
    first = next(int(row["iteration"]) for row in training_rows(killed / "metrics.jsonl") if row.get("resumed"))
    names = ("one rank", f"one rank, killed in iteration {last + 1}; resumed from {first - 1} on two ranks")
    try:
        comparison = compare(read_curve(unbroken), read_curve(killed), tolerance=None)
    except TrainerError as error:
        raise SystemExit(str(error)) from error

    def draw() -> None:
        write_figure(draw_comparisons([comparison], names), picture)

    write_page = partial(write_report, [unbroken, killed], page := picture.with_name("report.html"))
    for path, write in ((picture, draw), (page, write_page)):
        try:
            write()
            print(f"wrote {path}")
        except TrainerError as error:
            print(f"did not write {path}: {error}")
    print(report(comparison))
    return 0 if comparison.equal else 1


def training_rows(metrics: Path) -> list[dict[str, float]]:
    """Return the completely recorded training iterations."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if "loss" in row]


def say(line: str) -> None:
    """Print a headline."""
    print(f"\n== {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
