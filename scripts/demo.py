"""Train, train again and get killed, resume with the same command, and compare the two curves.

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
from pathlib import Path

from trainer.commands.arguments import local_path
from trainer.commands.compare_loss import main as compare_loss

KILL_AFTER = 49


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=local_path, default=Path("runs/demo"), help="deleted first, then created")
    folder = parser.parse_args(arguments).folder
    shutil.rmtree(folder, ignore_errors=True)
    unbroken, killed = folder / "unbroken", folder / "killed"
    say("1. a run of 100 iterations, undisturbed")
    subprocess.run(command(unbroken), check=True)
    say(f"2. the same in another folder, killed (SIGKILL) inside iteration {KILL_AFTER + 1}")
    kill_inside_iteration(command(killed), killed / "metrics.jsonl")
    say("3. the same command again: it resumes")
    subprocess.run(command(killed), check=True)
    say("4. both curves compared")
    return compare_loss([str(unbroken), str(killed), "--bitwise", "--plot", str(folder / "overlay.png")])


def command(run: Path) -> list[str]:
    """Return the command of a run, the same to start and to resume it."""
    return [sys.executable, "-m", "trainer", "experiment=demo", f"run.dir={run}"]


def kill_inside_iteration(run: Sequence[str], metrics: Path) -> None:
    """Start a run and kill it with SIGKILL halfway through the iteration after `KILL_AFTER`."""
    process = subprocess.Popen(run)
    try:
        while (row := last_row(metrics)).get("iteration", 0) < KILL_AFTER:
            if process.poll() is not None:
                raise SystemExit(f"the run ended before it could be killed, status {process.returncode}")
            time.sleep(0.005)
        time.sleep(0.5 * row["seconds"])
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    say(f"   killed, the last recorded iteration is {last_row(metrics)['iteration']}")


def last_row(metrics: Path) -> dict[str, float]:
    """Return the last completely recorded training iteration, or None."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return next((row for row in reversed(rows) if "loss" in row), {})


def say(line: str) -> None:
    """Print a headline."""
    print(f"\n== {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
