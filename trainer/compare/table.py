"""Names runs, and gives comparisons as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.compare.curves import Comparison, Curve, meaning_of
from trainer.metrics.json_lines import METRICS

Row = dict[str, Any]


def name_runs(sources: Sequence[str]) -> list[str]:
    """Return distinct run names: the run's folder, or the file for a text log. If two are equal, paths are names.

    If the same file is passed twice, it is numbered.
    """
    paths = [Path(source) for source in sources]
    paths = [path.parent if path.name == METRICS else path for path in paths]
    names = [path.resolve().name or str(path) for path in paths]
    if len({*names}) < len({*paths}):
        names = [*map(str, paths)]
    earlier = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name} ({count + 1})" if count else name for name, count in zip(names, earlier, strict=True)]


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
            "difference": _finite(largest.size),
            **{side: _finite(getattr(largest, side)) for side in ("base", "test")},
            **{f"{side}_hex": getattr(largest, side).hex() for side in ("base", "test")},
        },
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def summarize_all(comparisons: Mapping[str, Comparison], base: str) -> Row:
    """Return the results of comparisons against a common base as JSON.

    Args:
        comparisons: Results from `compare` by the test runs' names.
        base: The base's name.
    """
    results = comparisons.values()
    return {
        "base": _curve_members(next(iter(results)).base, base),
        "runs": [summarize(comparison, name) for name, comparison in comparisons.items()],
        "equal": all(comparison.equal for comparison in results),
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
