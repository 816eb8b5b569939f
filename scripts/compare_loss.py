"""Compare the training losses of two runs: `python scripts/compare_loss.py BASE TEST`.

Each argument is a run folder, a metrics.jsonl or a text log. The exit status is 0 when the curves are equal, 1 when
they differ, 2 when an input cannot be used.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace

from trainer.curves import Curve, Tolerance, common_dtype, compare, read_curve, report
from trainer.curves_plot import plot_comparison
from trainer.errors import TrainerError

EQUAL, DIFFERENT, UNUSABLE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two runs as the command line says, print a report and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        base, test = (_read(path, options) for path in (options.base, options.test))
        comparison = compare(
            base,
            test,
            tolerance=None if options.bitwise else _tolerance(options, base, test),
            allow_missing_prefix=options.allow_missing_prefix,
        )
        if options.plot:
            plot_comparison(comparison, options.plot)
            print(f"compare_loss: wrote {options.plot}", file=sys.stderr)
    except TrainerError as error:
        print(f"compare_loss: {error}", file=sys.stderr)
        return UNUSABLE
    print(report(comparison, max_rows=options.max_rows))
    return EQUAL if comparison.equal else DIFFERENT


def _read(path: str, options: argparse.Namespace) -> Curve:
    curve = read_curve(path, last_wins=options.last_wins)
    return replace(curve, dtype=options.dtype) if options.dtype else curve


def _tolerance(options: argparse.Namespace, base: Curve, test: Curve) -> Tolerance:
    bfloat16 = common_dtype(base, test) == "bfloat16"
    return Tolerance(options.threshold_bf16 if bfloat16 else options.threshold_fp32, options.rtol)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compare_loss",
        description="Compare the training losses of two runs, iteration by iteration.",
        epilog="Exit status: 0 equal, 1 different, 2 unusable input.",
    )
    parser.add_argument("base", metavar="BASE", help="run folder, metrics.jsonl or text log that is right")
    parser.add_argument("test", metavar="TEST", help="run folder, metrics.jsonl or text log that is looked at")
    parser.add_argument(
        "--threshold-fp32", type=_amount, default=1e-5, metavar="X", help="absolute tolerance in float32 (%(default)g)"
    )
    parser.add_argument(
        "--threshold-bf16", type=_amount, default=1e-2, metavar="X", help="absolute tolerance in bfloat16 (%(default)g)"
    )
    parser.add_argument(
        "--rtol", type=_amount, default=0.0, metavar="R", help="tolerance relative to BASE, added to it (%(default)g)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default=None,
        help="which threshold to use; without it, as config.yaml beside metrics.jsonl says, else float32",
    )
    parser.add_argument(
        "--bitwise", action="store_true", help="loss, grad_norm and lr must have equal bits; needs metrics.jsonl"
    )
    parser.add_argument(
        "--allow-missing-prefix", action="store_true", help="TEST may start later than BASE, as after a resume"
    )
    parser.add_argument(
        "--last-wins", action="store_true", help="in a text log, the later of two lines of one iteration counts"
    )
    parser.add_argument("--plot", metavar="FILE", default=None, help="draw both curves and their difference")
    parser.add_argument(
        "--max-rows", type=_count, default=20, metavar="N", help="differing values in the table (%(default)d)"
    )
    return parser


def _amount(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number of at least 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
