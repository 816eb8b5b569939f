"""Measure saving and loading against raw I/O and other ways: `python -m scripts.bench.checkpoint`.

Every figure has its ratio to the raw write or read of the same round, so that a slow or busy disk cancels out.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from scripts.bench import machine, tables, targets
from scripts.bench.peers import leave, peer_ways
from scripts.bench.probe import Loop
from scripts.bench.ranks import run_ranks
from scripts.bench.rounds import Rounds, run_rounds
from scripts.bench.subject import PARALLEL, SIZES, Subject, build_subject
from scripts.bench.targets import BenchTarget
from scripts.bench.training import growth_over_saves, save_back_to_back, train_with_saves_into
from scripts.bench.ways import own_ways
from trainer.commands.arguments import existing_folder
from trainer.launch import process_group as launch

_HELD_SIZE = "gpt2_124m"  # the size of the targets; at smaller sizes the fixed cost of a save dominates
PARTS = ("ways", "back-to-back", "growth", "training", "ranks")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurements, print the tables and return the exit status."""
    options = _parser().parse_args(arguments)
    log = logging.getLogger("trainer")
    level = log.level
    log.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch")
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=options.folder))
    try:
        lines = _measure(options, folder)
    finally:
        leave()
        shutil.rmtree(folder)
        log.setLevel(level)
    print("\n".join(lines))
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def _measure(options: argparse.Namespace, folder: Path) -> list[str]:
    cluster = launch.start("cpu", deterministic=False)
    subject = build_subject(SIZES[options.size], PARALLEL["one rank"], cluster)
    measured: list[BenchTarget] = []
    rows: list[str] = []
    if "ways" in options.only:
        ways = {**own_ways(subject), **peer_ways(subject)}
        chosen = {name: way for name, way in ways.items() if not options.rows or name in options.rows}
        loop = Loop() if options.size != "small" else Loop(width=64, quiet_s=0.02)
        rounds = Rounds()
        if options.samples:
            rounds.read(options.samples)
        run_rounds(subject, chosen, folder, results=rounds, rounds=options.rounds, loop=loop, say=_say)
        if options.samples:
            rounds.write(options.samples)
        rows = _ways_lines(rounds, list(chosen), subject)
        measured += targets.of_rounds(rounds, total_bytes=subject.total_bytes)
    if "back-to-back" in options.only:
        _say("saves back to back")
        measured += targets.of_back_to_back(save_back_to_back(subject, folder / "saves", saves=options.rounds))
    if "training" in options.only:
        _say("training with a save of every iteration")
        measured += targets.of_training(train_with_saves_into(subject, folder / "training", rounds=options.rounds))
    total_gb = subject.total_bytes / 1e9
    del subject
    if "growth" in options.only:
        _say(f"{options.saves} saves")
        small = build_subject(SIZES[options.growth_size], PARALLEL["one rank"], cluster)
        grown = growth_over_saves(small, folder / "growth", saves=options.saves)
        measured += targets.of_growth(grown, saves=options.saves)
    if "ranks" in options.only:
        _say("two ranks")
        measured += targets.of_ranks(run_ranks(folder / "ranks", size=options.size, rounds=options.rounds))
    if options.size != _HELD_SIZE:
        measured = [replace(target, most=None) for target in measured]
    measured.sort(key=lambda target: target.letter)
    head = [f"- {line}" for line in machine.describe(folder)]
    about = f"State: {options.size}, {total_gb:.3f} GB, parameters and moments in float32."
    return [*head, "", about, *rows, "", *tables.table(targets.HEAD, [target.row() for target in measured])]


def _ways_lines(rounds: Rounds, names: Sequence[str], subject: Subject) -> list[str]:
    rows = tables.ways_table(rounds, names, total_bytes=subject.total_bytes)
    counted = f"{len(rounds.all)} rounds."
    notes = [f"- {line}" for line in [counted, *tables.NOTES, *tables.round_lines(rounds)]]
    return ["", *rows, "", *notes]


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_checkpoint", description=__doc__)
    parser.add_argument("--folder", type=existing_folder, default=Path(), help="parent of a temporary folder")
    parser.add_argument("--size", choices=SIZES, default=_HELD_SIZE, help="the model (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which all ways take turns (%(default)d)")
    parser.add_argument("--only", type=_parts, default=PARTS, metavar="PART,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rows", type=_names, default=(), metavar="NAME;...", help="of the table of ways")
    parser.add_argument("--saves", type=int, default=100, help="saves of the memory-growth test (%(default)d)")
    parser.add_argument(
        "--growth-size", choices=SIZES, default="gpt2_4m", help="model of the memory-growth test (%(default)s)"
    )
    parser.add_argument(
        "--samples", type=Path, metavar="FILE", help="add the rounds stored in FILE, and store all rounds there"
    )
    parser.add_argument("--markdown", type=Path, default=None, metavar="FILE", help="also write the tables to FILE")
    return parser


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if unknown := set(parts) - set(PARTS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return parts


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(";"))


if __name__ == "__main__":
    sys.exit(main())
