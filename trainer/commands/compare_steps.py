"""Find where two runs that should be equal part: `reprise compare-steps A B`.

The first iteration with other losses is found in `metrics.jsonl`. Both runs are trained again from their newest equal
checkpoints to that iteration, each on as many ranks as before, and the first tensor with other bits is named: in a
forward or backward pass, among the gradients, or after the optimizer's step. The exit status is 0 where nothing
differs, 1 where something does, 2 where the command cannot be carried out.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict

from reprise.errors import DataError, TrainerError
from reprise.storage import FILE_SYSTEM, dumps
from trainer.commands.arguments import existing_folder, local_path, natural

EQUAL, DIFFERENT, UNUSABLE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, print a report and return the exit status."""
    options = _parser().parse_args(arguments)
    from trainer.steps import search
    from trainer.steps.replay import replay

    logging.basicConfig(level=logging.WARNING, format="reprise compare-steps: %(message)s", stream=sys.stderr)
    try:
        if options.record is not None:
            values = options.values
            replay(
                options.a, options.first, options.last, options.record, FILE_SYSTEM, begin=options.begin, values=values
            )
            return EQUAL
        if options.b is None:
            raise DataError("Two runs are compared", found="one", fix="Name a second, or a folder with --record.")
        report = search.compare_steps(options.a, options.b, iteration=options.iteration, folder=options.keep)
    except TrainerError as error:
        print(f"reprise compare-steps: {error}", file=sys.stderr)
        return UNUSABLE
    if options.json:
        print(dumps(asdict(report)))
    else:
        print("\n".join(search.report_lines(report)))
    return EQUAL if report.is_equal else DIFFERENT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="reprise compare-steps",
        description="Find the first tensor in which two runs that should be equal differ.",
        epilog="Exit status: 0 nothing differs, 1 something does, 2 it cannot be found out.",
    )
    parser.add_argument("a", type=existing_folder, metavar="A", help="the folder of a run, or of --record")
    parser.add_argument("b", type=existing_folder, metavar="B", nargs="?", help="the folder to compare it with")
    parser.add_argument(
        "--iteration", type=natural, metavar="N", help="train again up to it; default: the first with other figures"
    )
    parser.add_argument("--keep", type=local_path, metavar="FOLDER", help="keep the records of both there")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    record = parser.add_argument_group("to record one run, as each rank of a launch")
    record.add_argument("--record", type=local_path, metavar="FOLDER", help="train A again and record it there")
    record.add_argument(
        "--from", type=natural, default=0, dest="first", metavar="N", help="the checkpoint to begin with"
    )
    record.add_argument("--to", type=natural, default=0, dest="last", metavar="N", help="the last iteration")
    record.add_argument("--begin", type=natural, default=0, metavar="N", help="the first iteration to record")
    record.add_argument(
        "--values", action="append", default=[], metavar="KEY", help="a tensor whose values are kept; default: any"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
