"""Train on one rank, train again and get killed, resume twice on two ranks, and compare the two curves.

The first resume is tensor parallel, the second data parallel.

It needs what `pip install '.[train]'` installs. With `plot` and `report` it also draws a picture and a page.

The exit status is 0 if the two loss curves have equal bits, else not 0.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.faults.ranks import launcher
from scripts.faults.run_files import rows_of
from trainer.commands.arguments import local_path

KILL_AFTER = 49
MOVE_AFTER = 80
# With `invariant_ranks` of the experiment: the same bits at tensor parallelism too.
SHARDS = ("parallel.invariant_tensor_ranks=2", "model.pad_vocab_multiple=2")
ONE_RANK, TWO_RANKS = ([*launcher(ranks), "-m", "trainer"] for ranks in (1, 2))


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
    kill_inside_iteration([*ONE_RANK, *overrides, f"run.dir={killed}"], killed)
    resumed = [*TWO_RANKS, *overrides, f"run.dir={killed}", "checkpoint.reshard=true"]
    say(f"3. the killed run is resumed on two tensor-parallel ranks, up to iteration {MOVE_AFTER}")
    subprocess.run([*resumed, "parallel=tp2_sp", f"train.exit_interval={MOVE_AFTER}"], check=True)
    say("4. and from there on two data-parallel ranks")
    subprocess.run(resumed, check=True)
    say("5. both curves compared")
    return compare_runs(unbroken, killed)


def kill_inside_iteration(command: Sequence[str], run: Path) -> None:
    """Start a run, and kill it with SIGKILL halfway through the iteration after `KILL_AFTER`."""
    process = subprocess.Popen(command)
    try:
        while not (rows := rows_of(run)) or rows[-1]["iteration"] < KILL_AFTER:
            if process.poll() is not None:
                raise SystemExit(f"the run ended before it could be killed, status {process.returncode}")
            time.sleep(0.005)
        time.sleep(0.5 * rows[-1]["seconds"])
    finally:
        process.kill()
        process.wait()
    say(f"   killed, the last recorded iteration is {rows_of(run)[-1]['iteration']}")


def compare_runs(unbroken: Path, killed: Path) -> int:
    """Print the comparison of both curves, draw it if it can be, and return 0 if they have equal bits."""
    compare = ["compare-loss", str(unbroken), str(killed), "--bitwise"]
    picture, page = (str(unbroken.with_name(name)) for name in ("overlay.png", "report.html"))
    reprise("report", str(unbroken), str(killed), "--output", page)
    reprise(*compare, "--plot", picture, output=subprocess.DEVNULL)
    return reprise(*compare)


def reprise(*words: str, output: int | None = None) -> int:
    """Run a command and return its exit status; it says itself what is missing."""
    return subprocess.run([sys.executable, "-m", "reprise", *words], stdout=output, check=False).returncode


def say(line: str) -> None:
    """Print a headline."""
    print(f"\n== {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
