"""The command line of random cases: tries those of a range of numbers, and prints what differs."""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

C = TypeVar("C")

log = logging.getLogger(__name__)  # of refusals, for `--verbose`


def main_of(
    case_of: Callable[..., C],
    try_cases: Callable[[Sequence[C], Path], tuple[list[str], Counter[str]]],
    arguments: Sequence[str] | None,
    *,
    about: str | None,
    ranks: int,
    most_ranks: int,
) -> int:
    """Try the cases, print what differs, and return the exit status.

    Args:
        case_of: returns the case of a seed and a number, on up to so many `ranks`.
        try_cases: returns the problems of cases, and how often each outcome was seen; refusals go to `log`.
        about: the text of `--help`.
        ranks: where the arguments name none.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument(
        "--ranks", type=int, default=ranks, choices=range(1, most_ranks + 1), help="most ranks of a case"
    )
    parser.add_argument("--verbose", action="store_true", help="print the refusals too")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.INFO if options.verbose else logging.WARNING)
    start = time.monotonic()
    cases = [case_of(options.seed, options.first + n, ranks=options.ranks) for n in range(options.cases)]
    with tempfile.TemporaryDirectory() as folder:
        problems, outcomes = try_cases(cases, Path(folder))
    for problem in problems:
        print(problem)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    print(f"{len(cases)} cases in {time.monotonic() - start:.0f} s: {counts}; {len(problems)} problems")
    return 1 if problems else 0
