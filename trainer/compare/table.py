"""Reports several comparisons against a common base: run names, a table and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reprise.storage import finite
from trainer.compare.curves import Comparison, Curve, described, meaning_of, meanings
from trainer.compare.read import LLMC_LOG
from trainer.compare.text_table import format_table
from trainer.metrics.json_lines import METRICS

DIFFERENT, MISSING = "DIFFERENT", "MISSING"
Row = dict[str, Any]


def name_runs(sources: Sequence[str]) -> list[str]:
    """Return the shortest distinct run names: the run's folder, or the file for a text log.

    Equal names are extended with parent folders. If the same file is passed twice, it is numbered.
    """
    paths = [Path(source).absolute() for source in sources]
    parts = [(path.parent if path.name in (METRICS, LLMC_LOG) else path).parts for path in paths]
    names = list[str]()
    for part in parts:
        lengths = range(1, len(part))
        length = next((n for n in lengths if len({p for p in parts if p[-n:] == part[-n:]}) == 1), len(part))
        name = str(Path(*part[-length:]))
        numbered = (name, *(f"{name} ({number})" for number in range(2, len(parts) + 2)))
        names.append(next(free for free in numbered if free not in names))
    return names


def summarize(comparison: Comparison, name: str) -> Row:
    """Return a comparison's result as members of a standard JSON object. Floats are also given in hex.

    Args:
        comparison: The result from `compare`.
        name: The test run's name.
    """
    different, largest, tolerance = comparison.different, comparison.largest, comparison.tolerance
    return {
        **_curve_members(comparison.test, name),
        "tolerance": tolerance and {"absolute": tolerance.absolute, "relative": tolerance.relative},
        "equal": comparison.equal,
        "bit_identical": comparison.bit_identical,
        "compared": comparison.compared,
        "bit_equal": comparison.bit_equal,
        "missing_in_base": len(comparison.missing_in_base),
        "missing_in_test": len(comparison.missing_in_test),
        "allowed_prefix": len(comparison.allowed_prefix),
        "different": len(different),
        "first_different_iteration": int(different[0]) if different.size else None,
        "largest_loss_difference": largest
        and {
            "iteration": largest.iteration,
            "difference": finite(largest.size),
            **{side: finite(getattr(largest, side)) for side in ("base", "test")},
            **{f"{side}_hex": getattr(largest, side).hex() for side in ("base", "test")},
        },
    }


def summarize_all(comparisons: Sequence[Comparison], names: Sequence[str]) -> Row:
    """Return the results of comparisons against a common base as JSON. `names` starts with the base's name."""
    return {
        "base": _curve_members(comparisons[0].base, names[0]),
        "runs": [summarize(comparison, name) for comparison, name in zip(comparisons, names[1:], strict=True)],
        "equal": all(comparison.equal for comparison in comparisons),
    }


def report_all(comparisons: Sequence[Comparison], names: Sequence[str]) -> str:
    """Return a table with a row per comparison against a common base. The last line is the verdict.

    Args:
        comparisons: Results from `compare`, all with the same base.
        names: The base's name, then the test runs' names in order.
    """
    curves = [comparisons[0].base, *(comparison.test for comparison in comparisons)]
    width = max(len(name) for name in names)
    lines = [
        f"{side}  {name.ljust(width)}  {described(curve)}"
        for side, name, curve in zip(["base", *["test"] * len(comparisons)], names, curves, strict=True)
    ]
    lines += [f"losses  {line}" for line in meanings(dict(zip(names, curves, strict=True)))]
    lines += dict.fromkeys(f"note  {note}" for curve in curves for note in curve.notes)
    rows = [_cells(comparison, name) for comparison, name in zip(comparisons, names[1:], strict=True)]
    lines += ["", *format_table([list(rows[0]), *(list(row.values()) for row in rows)]), ""]
    different, missing = ([row["run"] for row in rows if row["result"] == word] for word in (DIFFERENT, MISSING))
    verdicts = list[str]()
    if different:
        verdicts.append(f"{DIFFERENT}: {len(different)} of {len(rows)} runs from {names[0]}: {', '.join(different)}")
    if missing:
        verdicts.append(f"{MISSING}: iterations in {len(missing)} of {len(rows)} runs: {', '.join(missing)}")
    return "\n".join([*lines, "; ".join(verdicts) or f"equal: {len(rows)} of {len(rows)} runs to {names[0]}"])


def short_verdict(comparison: Comparison) -> str:
    """Return a short verdict on a run compared with the base."""
    if comparison.bit_identical:
        return "bit-identical"
    if comparison.equal:
        return f"equal within {comparison.tolerance}"
    if comparison.different.size:
        return f"{DIFFERENT} from {comparison.different[0]} on"
    return f"{MISSING} from {min((*comparison.missing_in_base[:1], *comparison.missing_in_test[:1]))} on"


def _cells(comparison: Comparison, name: str) -> dict[str, str]:
    row, largest = summarize(comparison, name), comparison.largest
    missing = row["missing_in_base"] + row["missing_in_test"]
    return {
        "run": name,
        "result": DIFFERENT if row["different"] else MISSING if missing else short_verdict(comparison),
        "tolerance": "equal bits" if comparison.tolerance is None else str(comparison.tolerance),
        "compared": str(comparison.compared),
        "missing": str(missing),
        "different": str(row["different"]),
        "first at": str(comparison.different[0]) if row["different"] else "-",
        "largest loss difference": f"{largest.size:.3e}" if largest else "0",
        "at": str(largest.iteration) if largest else "-",
    }


def _curve_members(curve: Curve, name: str) -> Row:
    first, last = curve.points.iterations[[0, -1]].tolist()
    return {
        "run": name,
        "source": curve.source,
        "iterations": len(curve.points),
        "first_iteration": first,
        "last_iteration": last,
        "dtype": curve.dtype,
        "losses": meaning_of(curve),
        "notes": list(curve.notes),
    }
