"""Compare the training losses of runs with a base run: `reprise compare-loss BASE TEST [TEST ...]`.

Each argument is a run folder, a metrics.jsonl or a text log. Or BASE and TEST are two folders with logs, which are
compared by name. The exit status is 0 when all curves equal BASE, 1 when a curve differs, 2 when an input cannot be
used.
"""

from __future__ import annotations

import argparse
import sys

from trainer.commands.arguments import amount, natural
from trainer.commands.frame import BAD, FINE, framed
from trainer.compare.defaults import TOLERANCES


def compare(options: argparse.Namespace) -> int:
    """Print the report and return the exit status."""
    from trainer.compare.losses import compare_losses

    text, is_equal = compare_losses(options)
    if options.plot:
        print(f"reprise compare-loss: wrote {options.plot}", file=sys.stderr)
    print(text)
    return FINE if is_equal else BAD


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "base", metavar="BASE", help="the reference: a run folder, metrics.jsonl or text log, or a folder with logs"
    )
    parser.add_argument(
        "tests", metavar="TEST", nargs="+", help="a run folder, metrics.jsonl or text log to compare with BASE"
    )
    parser.add_argument("--threshold", type=amount, metavar="X", help="absolute tolerance in any dtype")
    parser.add_argument(
        "--threshold-fp32",
        type=amount,
        default=TOLERANCES["float32"],
        metavar="X",
        help="absolute tolerance in float32 (%(default)g)",
    )
    parser.add_argument(
        "--threshold-bf16",
        type=amount,
        default=TOLERANCES["bfloat16"],
        metavar="X",
        help="absolute tolerance in bfloat16 (%(default)g)",
    )
    parser.add_argument(
        "--rtol", type=amount, default=0.0, metavar="R", help="tolerance relative to BASE, added to it (%(default)g)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="which threshold to use; default: the dtype in config.yaml or in the log's file name, else float32",
    )
    parser.add_argument(
        "--bitwise", action="store_true", help="require equal bits in loss, grad_norm and lr; needs metrics.jsonl"
    )
    parser.add_argument(
        "--allow-missing-prefix", action="store_true", help="TEST may start later than BASE, as after a resume"
    )
    parser.add_argument("--plot", metavar="FILE", help="plot all curves and their differences from BASE")
    parser.add_argument(
        "--max-rows",
        type=natural,
        default=20,
        metavar="N",
        help="the most differing values to list for a single TEST (%(default)d)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


main = framed(compare, _add_arguments)
