"""Compare the training losses of runs with a base: `reprise compare-loss BASE TEST [TEST ...]`.

Each argument is a run folder, a metrics.jsonl or a text log; or BASE and TEST are two folders of logs, which are
compared by name. The exit status is 0 when all curves are equal to BASE, 1 when a curve differs, 2 when an input cannot
be used. A metric that `reprise follow` has recorded of a run is shown beside the validation loss, and changes no
status.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from reprise.errors import DataError, TrainerError
from reprise.storage import dumps, exists, is_dir, is_file
from trainer.commands.arguments import amount, natural
from trainer.compare.curves import TOLERANCES, Comparison, Tolerance, common_dtype, compare, report
from trainer.compare.evaluations import evaluation_table, read_all_evaluations
from trainer.compare.plot import plot_comparisons
from trainer.compare.points import Curve
from trainer.compare.read import LLMC_LOG, METRICS_FILE, read_curves
from trainer.compare.table import name_runs, report_all, summarize, summarize_all

EQUAL, DIFFERENT, UNUSABLE = 0, 1, 2
_SUFFIXES = (".log", ".txt", ".jsonl")
_DTYPES = {"bfloat16": ("bfloat16", "bf16"), "float32": ("float32", "fp32")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, print a report and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        if all(map(_is_log_folder, (options.base, *options.tests))):
            return _compare_folders(options)
        base, *tests = _read((options.base, *options.tests), options)
        names = name_runs([curve.source for curve in (base, *tests)])
        comparisons = [_compare(base, test, options) for test in tests]
        evaluations = read_all_evaluations((options.base, *options.tests))
        if options.plot:
            plot_comparisons(comparisons, names, options.plot, evaluations=evaluations)
            print(f"reprise compare-loss: wrote {options.plot}", file=sys.stderr)
    except TrainerError as error:
        print(f"reprise compare-loss: {error}", file=sys.stderr)
        return UNUSABLE
    metrics = dict(zip(names, evaluations, strict=True)) if any(evaluations) else {}
    if options.json:
        print(dumps(summarize_all(comparisons, names) | ({"evaluations": metrics} if metrics else {})))
    else:
        if metrics:
            print("\n".join([*evaluation_table(metrics), ""]))
        is_single = len(comparisons) == 1
        print(report(comparisons[0], max_rows=options.max_rows) if is_single else report_all(comparisons, names))
    return EQUAL if all(comparison.equal for comparison in comparisons) else DIFFERENT


def _compare_folders(options: argparse.Namespace) -> int:
    """Compare the logs of two folders by name; a log without a partner is a difference."""
    if len(options.tests) > 1 or options.plot:
        raise DataError(
            "Folders of logs are compared two at a time and without a plot",
            found=f"{1 + len(options.tests)} folders" if len(options.tests) > 1 else f"--plot {options.plot}",
            fix="Name two folders, or the logs themselves.",
        )
    test = options.tests[0]
    of_base, of_test = _logs(Path(options.base)), _logs(Path(test))
    if not of_base.keys() & of_test.keys():
        raise DataError(
            "Two folders have no log of the same name",
            where=f"{options.base} and {test}",
            expected=f"files that end in {', '.join(_SUFFIXES)}, or the folders of two runs with {METRICS_FILE}",
            found=f"{len(of_base)} and {len(of_test)} logs",
        )
    comparisons = dict[str, Comparison]()
    for name in sorted(of_base.keys() & of_test.keys()):
        curves = _read([str(of_base[name]), str(of_test[name])], options)
        comparisons[name] = _compare(curves[0], curves[1], options)
    lacking = {
        "only_in_base": sorted(of_base.keys() - of_test.keys()),
        "only_in_test": sorted(of_test.keys() - of_base.keys()),
    }
    alone = [(n, folder) for names, folder in zip(lacking.values(), (options.base, test), strict=True) for n in names]
    equal = sum(comparison.equal for comparison in comparisons.values())
    if options.json:
        logs = [summarize(comparison, name) for name, comparison in comparisons.items()]
        print(dumps({"logs": logs, **lacking, "equal": equal == len(comparisons) and not alone}))
    else:
        for name, comparison in comparisons.items():
            print(f"{name}\n{report(comparison, max_rows=options.max_rows)}\n")
        for name, folder in alone:
            print(f"{name} is in {folder} alone")
        print(f"{equal} of {len(comparisons)} logs are equal")
    return EQUAL if equal == len(comparisons) and not alone else DIFFERENT


def _compare(base: Curve, test: Curve, options: argparse.Namespace) -> Comparison:
    return compare(
        base,
        test,
        tolerance=None if options.bitwise else _tolerance(options, base, test),
        allow_missing_prefix=options.allow_missing_prefix,
    )


def _read(paths: Sequence[str], options: argparse.Namespace) -> list[Curve]:
    curves = zip(paths, read_curves(paths, last_wins=options.last_wins), strict=True)
    return [replace(curve, dtype=options.dtype or curve.dtype or _dtype_in_name(path)) for path, curve in curves]


def _tolerance(options: argparse.Namespace, base: Curve, test: Curve) -> Tolerance:
    of_dtype = options.threshold_bf16 if common_dtype(base, test) == "bfloat16" else options.threshold_fp32
    return Tolerance(of_dtype if options.threshold is None else options.threshold, options.rtol)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="reprise compare-loss",
        description="Compare the training losses of runs with those of one, iteration by iteration.",
        epilog="Exit status: 0 all equal to BASE, 1 one differs, 2 unusable input.",
    )
    parser.add_argument(
        "base", metavar="BASE", help="run folder, metrics.jsonl or text log of the reference, or a folder of logs"
    )
    parser.add_argument(
        "tests", metavar="TEST", nargs="+", help="run folder, metrics.jsonl or text log that is compared with it"
    )
    parser.add_argument("--threshold", type=amount, default=None, metavar="X", help="absolute tolerance in any dtype")
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
        default=None,
        help="which threshold to use; default: that of config.yaml or of the name of a log, else float32",
    )
    parser.add_argument(
        "--bitwise", action="store_true", help="loss, grad_norm and lr must have equal bits; needs metrics.jsonl"
    )
    parser.add_argument(
        "--allow-missing-prefix", action="store_true", help="TEST may start later than BASE, as after a resume"
    )
    parser.add_argument(
        "--last-wins",
        action="store_true",
        help="in the log of a resumed run, a later launch replaces what an earlier one logged from there on",
    )
    parser.add_argument("--plot", metavar="FILE", default=None, help="draw all curves and their differences to BASE")
    parser.add_argument(
        "--max-rows",
        type=natural,
        default=20,
        metavar="N",
        help="differing values in the table of a single TEST (%(default)d)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _is_log_folder(path: str | Path) -> bool:
    """Return whether a path is a folder of logs, and not the folder of a run."""
    folder = Path(path)
    return is_dir(folder) and not any(exists(folder / name) for name in (METRICS_FILE, LLMC_LOG))


def _dtype_in_name(path: str | Path) -> str | None:
    """Return the dtype in the name of a log such as `gpt2_1_bfloat16.log`; None if there is none."""
    name = Path(path).stem.lower()
    return next((dtype for dtype, words in _DTYPES.items() if any(word in name for word in words)), None)


def _logs(folder: Path) -> dict[str, Path]:
    try:
        return {path.name: path for path in folder.iterdir() if path.suffix in _SUFFIXES and is_file(path)}
    except OSError as error:
        raise DataError("Cannot read a folder of logs", where=folder, found=error.strerror) from error


if __name__ == "__main__":
    sys.exit(main())
