"""Find where two runs that should be equal diverge: `reprise compare-steps A B`.

The command finds the first iteration with different losses in `metrics.jsonl`. It trains both runs again from their
newest equal checkpoints to that iteration, each on as many ranks as before, and names the first tensor with different
bits: in a forward or backward pass, among the gradients, or after the optimizer step. The exit status is 0 if nothing
differs, 1 if something does, 2 if the command fails.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from reprise.errors import DataError
from reprise.storage import dumps
from trainer.commands.arguments import existing_folder, local_path, natural
from trainer.commands.frame import BAD, FINE, framed


def compare(options: argparse.Namespace) -> int:
    """Print a report and return the exit status."""
    from trainer.steps import search
    from trainer.steps.replay import replay

    if options.record is not None:
        first, last, out = options.first, options.last, options.record
        replay(options.a, first, last, out, begin=options.begin, values=options.values)
        return FINE
    if options.b is None:
        raise DataError("Only one run was passed", expected="two", fix="Pass a second run, or a folder with --record.")
    report = search.compare_steps(options.a, options.b, iteration=options.iteration, folder=options.keep)
    if options.json:
        print(dumps(asdict(report)))
    else:
        print("\n".join(search.report_lines(report)))
    return FINE if report.is_equal else BAD


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=existing_folder, metavar="A", help="a run's folder, or a --record folder")
    parser.add_argument("b", type=existing_folder, metavar="B", nargs="?", help="the folder to compare it with")
    parser.add_argument(
        "--iteration", type=natural, metavar="N", help="train again up to it; default: the first with different figures"
    )
    parser.add_argument("--keep", type=local_path, metavar="FOLDER", help="keep both runs' records there")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    record = parser.add_argument_group("to record one run, as each rank of a launch")
    record.add_argument("--record", type=local_path, metavar="FOLDER", help="train A again and record it there")
    record.add_argument(
        "--from", type=natural, default=0, dest="first", metavar="N", help="the checkpoint to start from"
    )
    record.add_argument("--to", type=natural, default=0, dest="last", metavar="N", help="the last iteration")
    record.add_argument("--begin", type=natural, default=0, metavar="N", help="the first iteration to record")
    record.add_argument(
        "--values", action="append", default=[], metavar="KEY", help="a tensor whose values to keep; default: any"
    )


main = framed(compare, _add_arguments)
