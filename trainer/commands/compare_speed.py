"""Compare how fast runs were and what their saves cost: `reprise compare-speed RUN [RUN ...]`.

Each argument is a run folder, a metrics.jsonl or, with --tokens, another program's log. Ratios are relative to the
first run. The exit status is 0 when no run is slower than the first by more than --threshold, 1 when a run is, 2 when
an input cannot be used.
"""

from __future__ import annotations

import argparse

from reprise.storage import dumps
from trainer.commands.arguments import natural, positive, share
from trainer.commands.frame import BAD, FINE, framed
from trainer.compare.defaults import SKIPPED, THRESHOLD


def compare(options: argparse.Namespace) -> int:
    """Print the figures and return the exit status."""
    from trainer.compare import speed as engine
    from trainer.compare.table import name_runs

    timings = [engine.read_timing(path, options.tokens).without_first(options.skip) for path in options.runs]
    names = name_runs([timing.source for timing in timings])
    by_name = dict(zip(names, timings, strict=True))
    summary = engine.summarize_speeds(by_name, skipped=options.skip, threshold=options.threshold)
    if options.json:
        print(dumps(summary))
    else:
        for note in dict.fromkeys(note for timing in timings for note in timing.notes):
            print(f"note: {note}")
        print(engine.report_speeds(summary))
    return BAD if summary["slower"] else FINE


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="run folder, metrics.jsonl or log; the first is the base"
    )
    parser.add_argument("--tokens", type=positive, metavar="N", help="tokens per iteration, for other programs' logs")
    parser.add_argument(
        "--skip",
        type=natural,
        default=SKIPPED,
        metavar="N",
        help="leave out the first N iterations after each start, which are slower (%(default)d)",
    )
    parser.add_argument(
        "--threshold",
        type=share,
        default=THRESHOLD,
        metavar="X",
        help="a run is slower when its median tok/s is below the first run's by more than this share "
        "(%(default)g); 0.2 suits a shared machine",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


main = framed(compare, _add_arguments)
