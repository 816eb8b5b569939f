"""Measure a subject: `python -m scripts.bench SUBJECT [OPTIONS]`; `python -m scripts.bench SUBJECT --help` has these.

checkpoint: saving and loading, against raw I/O and other programs, and iterations with saves; on one rank or several
small_states: a state of a few bytes on four ranks, against torch's DCP
train: the training step, against transformers
startup: from the launch of a run to its first iteration
scale: what a commit and a start cost rank 0, by the number of ranks
stores: uploads to an object store and loads from it
cuda: steps, saves and loads on a device
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from scripts.bench.machine import describe
from scripts.faults.ranks import launcher
from trainer.commands.arguments import existing_folder

SUBJECTS = ("checkpoint", "small_states", "train", "startup", "scale", "stores", "cuda")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables and return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in SUBJECTS:
        print(__doc__, file=sys.stderr)
        return 2
    subject = importlib.import_module(f"scripts.bench.{words[0]}")
    parser = argparse.ArgumentParser(prog=f"python -m scripts.bench {words[0]}", description=subject.__doc__)
    parser.add_argument("--folder", type=existing_folder, default=Path(), help="parent of a temporary folder")
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="in which all sides take turns (%(default)d)"
    )
    parser.set_defaults(ranks=1)
    subject.add_arguments(parser)
    options = parser.parse_args(words[1:])
    logging.getLogger("trainer").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch")
    if "RANK" in os.environ:
        lines = subject.measure(options, options.folder)
        if os.environ["RANK"] == "0":
            print("\n".join(lines), flush=True)
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.folder) as name:
        folder = Path(name).absolute()
        machine = [f"- {line}" for line in describe(folder)]
        if options.ranks > 1:
            print("\n".join([*machine, ""]), flush=True)
            command = [*launcher(options.ranks), "-m", "scripts.bench", *words, "--folder", str(folder)]
            return subprocess.run(command, check=False).returncode
        tables = subject.measure(options, folder)
    print("\n".join([*machine, "", *tables]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
