"""Compares two loss curves value by value, and reports the result as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy

from reprise.errors import DataError, count_of
from trainer.compare.defaults import TOLERANCES
from trainer.compare.formats import OURS, Meaning
from trainer.compare.text_table import format_table
from trainer.metrics.json_lines import ABSENT, EXACT
from trainer.metrics.log_file import Floats, Integers, Mask, MetricColumns

QUANTITIES = ("loss", "grad_norm", "lr")


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """A run's values. A curve from `read_curve` has at least one iteration.

    Attributes:
        source: The file, for messages.
        points: The `QUANTITIES` columns, sorted by iteration without repeats.
        evaluations: The validation losses. Empty for a text log.
        dtype: The dtype in the run's config.yaml, `float32` or `bfloat16`. None if unknown.
        notes: Remarks on the file for the report, such as a truncated last line.
        meaning: What the losses mean.
    """

    source: str
    points: MetricColumns
    evaluations: MetricColumns
    dtype: str | None = None
    notes: tuple[str, ...] = ()
    meaning: Meaning = OURS


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Losses a (base) and b (test) are equal when |a - b| <= absolute + relative * |a|."""

    absolute: float
    relative: float = 0.0

    def admits(self, base: MetricColumns, test: MetricColumns) -> Mask:
        """Return which losses are equal. An infinity or NaN equals only itself."""
        a, b = base.values[:1], test.values[:1]
        with numpy.errstate(invalid="ignore", over="ignore"):
            limits = numpy.where(numpy.isfinite(a) & numpy.isfinite(b), self.absolute + self.relative * numpy.abs(a), 0)
        is_admitted: Mask = absolute_differences(a, b) <= limits
        return is_admitted

    def __str__(self) -> str:
        return f"{self.absolute:g}" + (f" + {self.relative:g} * |base|" if self.relative else "")


class CurveDifference(NamedTuple):
    """A quantity with different values on the two sides at an iteration.

    Attributes:
        size: The absolute difference, as defined by `absolute_differences`.
    """

    iteration: int
    quantity: str
    base: float
    test: float
    size: float


@dataclass(frozen=True, slots=True, eq=False)
class Sides:
    """Two curves' values at their common iterations, and which of them are unequal.

    Attributes:
        differ: Which values certainly have different bits, of shape (quantities, iterations).
        unequal: The same, or which losses differ by more than the tolerance, of shape (1, iterations).
    """

    base: MetricColumns
    test: MetricColumns
    differ: Mask
    unequal: Mask

    @staticmethod
    def of(base: MetricColumns, test: MetricColumns, tolerance: Tolerance | None) -> Sides:
        """Compare columns: their losses with a tolerance, or all quantities bit for bit."""
        if not numpy.array_equal(base.iterations, test.iterations):
            _, *places = numpy.intersect1d(base.iterations, test.iterations, assume_unique=True, return_indices=True)
            base, test = base.take(places[0]), test.take(places[1])
        differ = certainly_differ(base, test)
        return Sides(base, test, differ, differ if tolerance is None else ~tolerance.admits(base, test))

    @property
    def iterations(self) -> Integers:
        """The iterations with an unequal value."""
        iterations: Integers = self.base.iterations[self.unequal.any(axis=0)]
        return iterations

    @property
    def sizes(self) -> Floats:
        """The absolute loss differences."""
        return absolute_differences(self.base.values[0], self.test.values[0])

    def differences(self, most: int) -> list[CurveDifference]:
        """Return at most `most` differences, from the first iterations on."""
        places = numpy.flatnonzero(self.unequal.any(axis=0))[:most]
        pairs = numpy.argwhere(self.unequal[:, places].T)[:most].tolist()
        return [self.difference(int(places[number]), quantity) for number, quantity in pairs]

    def difference(self, place: int, quantity: int) -> CurveDifference:
        """Return the two values at a place, whether or not they differ."""
        base, test = self.base.values[quantity, place], self.test.values[quantity, place]
        iteration, name = int(self.base.iterations[place]), self.base.quantities[quantity]
        return CurveDifference(iteration, name, float(base), float(test), float(absolute_differences(base, test)))


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """The result from `compare`.

    Attributes:
        tolerance: None if equal bits were required.
        points, evaluations: The compared training values and validation losses at common iterations.
        different: Every compared iteration with an unequal value, in order.
        missing_in_base, missing_in_test: Iterations only on the other side. Curves with any are not equal.
        allowed_prefix: Iterations before the test side's first, allowed to be missing there.
        bit_equal: How many compared iterations are known to have equal bits in all values.
        largest: The largest loss difference, within the tolerance or not. None when all are equal.
    """

    base: Curve
    test: Curve
    tolerance: Tolerance | None
    points: Sides
    evaluations: Sides
    different: Integers
    missing_in_base: Integers
    missing_in_test: Integers
    allowed_prefix: Integers
    bit_equal: int
    largest: CurveDifference | None

    @property
    def compared(self) -> int:
        """How many iterations both sides have."""
        return len(self.points.base)

    @property
    def equal(self) -> bool:
        return not (self.different.size or self.missing_in_base.size or self.missing_in_test.size)

    @property
    def bit_identical(self) -> bool:
        """Return whether every compared value is known to be bit-identical."""
        return self.equal and self.bit_equal == self.compared

    @property
    def verdict(self) -> str:
        """The report's last line: the result for common iterations, then the missing iterations."""
        sides = {"test": self.missing_in_test, "base": self.missing_in_base}
        missing = [f"{len(holes)} in {side} (first at {holes[0]})" for side, holes in sides.items() if holes.size]
        total, before = self.compared, 0 if missing else len(self.allowed_prefix)
        unit = "compared iterations" if before else "iterations in both" if missing else "iterations"
        if self.different.size:
            parts = [f"DIFFERENT: {len(self.different)} of {total} {unit}, first at {self.different[0]}"]
        else:
            relation = "bit-identical" if self.bit_equal == self.compared else f"equal within {self.tolerance}"
            parts = [f"{relation}: {total}/{total} {unit}"] if total else []
        if before and parts:
            parts[-1] += f", {before} missing before them"
        return "; ".join([*parts, f"MISSING: {', '.join(missing)}"] if missing else parts)

    def differences(self, most: int) -> list[CurveDifference]:
        """Return the first differences in training values and validation losses, in iteration order."""
        rows = self.points.differences(most) + self.evaluations.differences(most)
        return sorted(rows, key=lambda row: row.iteration)[:most]


def tolerance_of(base: Curve, test: Curve) -> Tolerance:
    """Return the default tolerance for the two curves' common dtype. An unknown dtype counts as float32."""
    return Tolerance(TOLERANCES[common_dtype(base, test) or "float32"])


def compare(base: Curve, test: Curve, *, tolerance: Tolerance | None, allow_missing_prefix: bool = False) -> Comparison:
    """Compare two curves iteration by iteration.

    A tolerance applies to training and validation losses. Without one, bits must be equal in losses, grad_norm and lr
    wherever both sides have them.

    Args:
        base: The reference.
        test: The curve under test.
        tolerance: The allowed loss difference. None requires equal bits.
        allow_missing_prefix: Ignore iterations before the first in `test`, as for a resumed run.

    Raises:
        DataError: Equal bits are required but a loss is known only as a decimal, or the sides average their losses over
            different numbers of iterations.
    """
    _require_like(base, test)
    if tolerance is None:
        _require_exact(base)
        _require_exact(test)
    points = Sides.of(base.points, test.points, tolerance)
    evaluations = Sides.of(base.evaluations, test.evaluations, tolerance)
    common = points.base.iterations
    different = numpy.union1d(points.iterations, evaluations.iterations)
    missing, missing_in_base = (numpy.setdiff1d(curve.points.iterations, common) for curve in (base, test))
    prefix = int((missing < test.points.iterations[0]).sum()) if allow_missing_prefix else 0
    is_equal = (points.base.kinds[0] == EXACT) & (points.test.kinds[0] == EXACT) & ~points.differ.any(axis=0)
    is_equal &= ~numpy.isin(common, evaluations.base.iterations[evaluations.differ[0]])
    sizes = points.sizes
    largest = points.difference(int(sizes.argmax()), 0) if sizes.size else None
    return Comparison(
        base=base,
        test=test,
        tolerance=tolerance,
        points=points,
        evaluations=evaluations,
        different=different,
        missing_in_base=missing_in_base,
        missing_in_test=missing[prefix:],
        allowed_prefix=missing[:prefix],
        bit_equal=int(is_equal.sum()),
        largest=largest if largest and largest.size > 0 else None,
    )


def absolute_differences(base: Floats, test: Floats) -> Floats:
    """Return |base - test|. NaN and NaN, or equal infinities, give 0. Other nonfinite values give infinity."""
    with numpy.errstate(invalid="ignore", over="ignore"):
        sizes = numpy.where(numpy.isfinite(base) & numpy.isfinite(test), numpy.abs(base - test), math.inf)
    return numpy.where((base == test) | (numpy.isnan(base) & numpy.isnan(test)), 0.0, sizes)


def certainly_differ(base: MetricColumns, test: MetricColumns) -> Mask:
    """Return which values certainly differ, for columns with the same iterations.

    An exact value and a decimal prove no difference, unless either is nonfinite.
    """
    a, b = base.values, test.values
    bits_a, bits_b = (numpy.ascontiguousarray(values).view(numpy.int64) for values in (a, b))
    is_equal = (bits_a == bits_b) | (numpy.isnan(a) & numpy.isnan(b))
    is_proved = ((base.kinds == EXACT) == (test.kinds == EXACT)) | ~(numpy.isfinite(a) & numpy.isfinite(b))
    differs: Mask = (base.kinds != ABSENT) & (test.kinds != ABSENT) & ~is_equal & is_proved
    return differs


def _require_like(base: Curve, test: Curve) -> None:
    windows = _window(base), _window(test)
    if all(windows) and windows[0] != windows[1]:
        single = (base if base.meaning.is_mean else test).meaning
        raise DataError(
            "The two sides average their losses over different numbers of iterations",
            where=f"{base.source} and {test.source}",
            expected="a loss per iteration on both sides, or means over equally many",
            found=f"means of {windows[0]} and {windows[1]}",
            fix=f"Compare a run that logs every iteration (in {single.program}: {single.single}).",
        )


def _window(curve: Curve) -> int:
    """Return how many iterations most losses average, or 0 if unknown."""
    if not curve.meaning.is_mean:
        return 0 if curve.meaning.is_mean is None else 1
    steps = numpy.diff(curve.points.iterations, prepend=0)
    intervals, counts = numpy.unique(steps[1:] if len(steps) > 1 else steps, return_counts=True)
    return int(intervals[counts.argmax()])


def about(curves: Mapping[str, Curve]) -> list[tuple[str, str]]:
    """Describe curves by title: files, iterations and dtypes, what losses mean if other programs logged any, notes."""
    rows = list[tuple[str, str]]()
    for title, curve in curves.items():
        first, last = curve.points.iterations[[0, -1]]
        dtype = curve.dtype or "dtype unknown, taken as float32"
        count = count_of(len(curve.points), "iteration")
        rows.append((title, f"{curve.source}: {count}, {first} to {last}, {dtype}"))
    if any(curve.meaning != OURS for curve in curves.values()):
        rows += [("losses", f"{title}: {meaning_of(curve)}") for title, curve in curves.items()]
    return rows + [("note", note) for note in dict.fromkeys(note for curve in curves.values() for note in curve.notes)]


def meaning_of(curve: Curve) -> str:
    """Describe what a curve's losses mean."""
    return curve.meaning.describe(_window(curve))


def report(comparison: Comparison, *, max_rows: int = 20) -> str:
    """Return a text report. Its last line is the verdict.

    Args:
        comparison: The result from `compare`.
        max_rows: The most rows to list, for values and for ranges of missing iterations.
    """
    base, test, tolerance = comparison.base, comparison.test, comparison.tolerance
    rows = [
        *about({"base": base, "test": test}),
        ("tolerance", f"{tolerance} on the losses" if tolerance else "equal bits in losses, grad_norm and lr"),
    ]
    hint = " (--allow-missing-prefix allows iterations missing before the first one of test)"
    is_late = comparison.missing_in_test[:1] < test.points.iterations[:1]
    for title, words, iterations, advice in (
        ("allowed", "missing at the start of test", comparison.allowed_prefix, ""),
        ("missing", "in test", comparison.missing_in_test, hint if is_late.any() else ""),
        ("missing", "in base", comparison.missing_in_base, ""),
    ):
        if iterations.size:
            rows.append((title, f"{words}: {_ranges(iterations, max_rows)}{advice}"))
    if evaluated := len(comparison.evaluations.base):
        unequal = int(comparison.evaluations.unequal.sum())
        text = f"at {count_of(evaluated, 'iteration')} in both: {unequal} validation losses differ"
        rows.append(("evaluated", text))
    lines = [f"{title:9}  {text}" for title, text in rows]
    if differences := comparison.differences(max_rows):
        lines += ["", *_table(differences)]
    count = sum(int(sides.unequal.sum()) for sides in (comparison.points, comparison.evaluations))
    if count > max_rows:
        lines.append(f"... and {count - max_rows} more")
    if count:
        lines.append("")
    if (largest := comparison.largest) is not None:
        values = f"base {largest.base!r}, test {largest.test!r}"
        lines.append(f"largest    loss difference {largest.size:.3e} at iteration {largest.iteration} ({values})")
    return "\n".join([*lines, comparison.verdict])


def common_dtype(base: Curve, test: Curve) -> str | None:
    """Return the coarser dtype of two runs, or None if neither config names a dtype."""
    dtypes = {base.dtype, test.dtype} - {None}
    return "bfloat16" if "bfloat16" in dtypes else next(iter(dtypes), None)


def _require_exact(curve: Curve) -> None:
    is_exact = curve.points.kinds[0] == EXACT
    if not is_exact.all():
        raise DataError(
            "Equal bits cannot be proved from decimals",
            where=f"{curve.source}, iteration {curve.points.iterations[is_exact.argmin()]}",
            expected="loss_hex in every record",
            fix="Compare the metrics.jsonl of both runs, or drop --bitwise.",
        )


def _ranges(iterations: Integers, limit: int) -> str:
    """Format ascending integers as ranges such as `1-40, 43`."""
    borders = (numpy.diff(iterations) != 1).nonzero()[0]
    firsts, lasts = iterations[numpy.append(0, borders + 1)], iterations[numpy.append(borders, -1)]
    pairs = zip(firsts[:limit], lasts[:limit], strict=True)
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in pairs]
    left_out = len(firsts) - len(texts)
    return ", ".join([*texts, f"and {left_out} more ranges"] if left_out else texts) + f" ({len(iterations)} in all)"


def _table(differences: Sequence[CurveDifference]) -> list[str]:
    rows = [("iteration", "quantity", "base", "test", "difference")]
    rows += [(str(d.iteration), d.quantity, repr(d.base), repr(d.test), f"{d.size:.3e}") for d in differences]
    return format_table(rows, align=">")
