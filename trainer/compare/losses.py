"""Compares losses for `reprise compare-loss`: runs, or folders with logs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from reprise.errors import DataError
from reprise.storage import dumps, exists, is_dir, is_file
from trainer.compare.curves import Comparison, Curve, Tolerance, common_dtype, compare, report
from trainer.compare.plot import draw_comparisons, write_figure
from trainer.compare.read import DTYPES, read_curve, run_file
from trainer.compare.table import name_runs, summarize, summarize_all
from trainer.metrics.json_lines import METRICS

_SUFFIXES = (".log", ".txt", ".jsonl")


def compare_losses(options: Namespace) -> tuple[str, bool]:
    """Compare what the command line names, and draw its plot.

    Returns:
        The report or JSON to print, and whether all curves equal the base.

    Raises:
        TrainerError: An input cannot be used, or the plot cannot be written.
    """
    sources = (options.base, *options.tests)
    if all(map(_is_log_folder, sources)):
        return _compare_folders(options)
    base, *tests = curves = _read(sources, options)
    names = name_runs([curve.source for curve in curves])
    comparisons = {name: _compare(options, base, test) for name, test in zip(names[1:], tests, strict=True)}
    if options.plot:
        write_figure(draw_comparisons([*comparisons.values()], names), options.plot)
    is_equal = all(comparison.equal for comparison in comparisons.values())
    if options.json:
        return dumps(summarize_all(comparisons, names[0])), is_equal
    if len(comparisons) == 1:
        return report(*comparisons.values(), max_rows=options.max_rows), is_equal
    return "\n".join(_reports(comparisons, options, f"runs are equal to {names[0]}")), is_equal


def _compare_folders(options: Namespace) -> tuple[str, bool]:
    """Compare the logs in two folders by name. A log without a counterpart counts as a difference."""
    if len(options.tests) > 1 or options.plot:
        raise DataError(
            "Folders of logs are compared two at a time and without a plot",
            found=f"{1 + len(options.tests)} folders" if len(options.tests) > 1 else f"--plot {options.plot}",
            fix="Name two folders, or the logs themselves.",
        )
    folders = (options.base, options.tests[0])
    base_logs, test_logs = map(_logs, folders)
    common = sorted(base_logs.keys() & test_logs.keys())
    if not common:
        raise DataError(
            "The two folders share no log name",
            where=" and ".join(folders),
            expected=f"files that end in {', '.join(_SUFFIXES)}, or the folders of two runs with {METRICS}",
            found=f"{len(base_logs)} and {len(test_logs)} logs",
        )
    comparisons = {name: _compare(options, *_read([base_logs[name], test_logs[name]], options)) for name in common}
    alone = {"only_in_base": sorted({*base_logs} - {*common}), "only_in_test": sorted({*test_logs} - {*common})}
    is_equal = all(comparison.equal for comparison in comparisons.values()) and not any(alone.values())
    if options.json:
        logs = [summarize(comparison, name) for name, comparison in comparisons.items()]
        return dumps({"logs": logs, **alone, "equal": is_equal}), is_equal
    lines = [f"{n} is in {folder} alone" for names, folder in zip(alone.values(), folders, strict=True) for n in names]
    return "\n".join([*lines, *_reports(comparisons, options, "logs are equal")]), is_equal


def _reports(comparisons: Mapping[str, Comparison], options: Namespace, what: str) -> list[str]:
    """Report each comparison, then all verdicts. The last line counts the equal ones."""
    reports = [f"{name}\n{report(result, max_rows=options.max_rows)}\n" for name, result in comparisons.items()]
    verdicts = [f"{name}: {result.verdict}" for name, result in comparisons.items()]
    equal = sum(result.equal for result in comparisons.values())
    return [*reports, *verdicts, f"{equal} of {len(comparisons)} {what}"]


def _compare(options: Namespace, base: Curve, test: Curve) -> Comparison:
    dtype_threshold = options.threshold_bf16 if common_dtype(base, test) == "bfloat16" else options.threshold_fp32
    tolerance = Tolerance(dtype_threshold if options.threshold is None else options.threshold, options.rtol)
    is_prefix_allowed = options.allow_missing_prefix
    return compare(base, test, tolerance=None if options.bitwise else tolerance, allow_missing_prefix=is_prefix_allowed)


def _read(paths: Sequence[str], options: Namespace) -> list[Curve]:
    curves = ((path, read_curve(path)) for path in paths)
    return [replace(curve, dtype=options.dtype or curve.dtype or _dtype_in_name(path)) for path, curve in curves]


def _is_log_folder(path: str) -> bool:
    """Return whether a path is a folder with logs, rather than a run folder."""
    return is_dir(Path(path)) and not exists(run_file(path))


def _dtype_in_name(path: str) -> str | None:
    """Return the dtype in a log's name, such as `gpt2_1_bfloat16.log`, or None."""
    name = Path(path).stem.lower()
    return next((dtype for word, dtype in DTYPES.items() if word in name), None)


def _logs(folder: str) -> dict[str, str]:
    try:
        return {path.name: str(path) for path in Path(folder).iterdir() if path.suffix in _SUFFIXES and is_file(path)}
    except OSError as error:
        raise DataError("Cannot read a log folder", where=folder, found=error.strerror) from error
