"""Write a page about runs: `reprise report RUN [RUN ...] [--output report.html]`.

The page is a single file and opens without a network. The exit status is 0, or 2 if a run cannot be read.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from reprise.errors import TrainerError
from reprise.storage import FILE_SYSTEM, replace_file
from trainer.commands.arguments import local_path
from trainer.commands.frame import FINE, framed


def report(options: argparse.Namespace) -> int:
    """Write the page, and print its path."""
    print(f"wrote {write_report(options.runs, options.output)}")
    return FINE


def write_report(runs: Sequence[Path], output: Path) -> Path:
    """Write the page about runs, and return its path.

    Raises:
        TrainerError: A run cannot be read, a library is missing, or the file cannot be written.
    """
    from trainer.compare.table import name_runs
    from trainer.report.build import report_sections
    from trainer.report.history import read_history
    from trainer.report.page import render

    names = name_runs([str(run) for run in runs])
    histories = [(name, read_history(run)) for name, run in zip(names, runs, strict=True)]
    page = render(f"Report: {', '.join(names)}", report_sections(histories))
    try:
        replace_file(FILE_SYSTEM, output, page.encode())
    except OSError as error:
        raise TrainerError("Cannot write the report", where=output, found=error.strerror) from error
    return output


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=local_path, nargs="+", metavar="RUN", help="run folders, or their metrics.jsonl")
    parser.add_argument(
        "--output", type=local_path, default=Path("report.html"), metavar="FILE", help="the page (%(default)s)"
    )


main = framed(report, _add_arguments)
