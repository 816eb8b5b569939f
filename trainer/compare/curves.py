"""Compares two loss curves value by value, and reports the result in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy

from reprise.errors import DataError, count_of
from trainer.compare.formats import OURS
from trainer.compare.points import (
    QUANTITIES,
    Curve,
    CurveDifference,
    Mask,
    Points,
    Reading,
    absolute_differences,
    certainly_differ,
    common_points,
)
from trainer.compare.text_table import format_table
from trainer.metrics.json_lines import EXACT
from trainer.metrics.log_file import VALID_LOSS, Floats, Integers

# Absolute, by dtype.
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Losses a (base) and b (test) are equal when |a - b| <= absolute + relative * |a|."""

    absolute: float
    relative: float = 0.0

    def admits(self, base: Floats, test: Floats) -> Mask:
        """Return which losses are equal; an infinity or nan equals only itself."""
        sizes, is_finite = absolute_differences(base, test), numpy.isfinite(base) & numpy.isfinite(test)
        with numpy.errstate(invalid="ignore", over="ignore"):
            limits = numpy.where(is_finite, self.absolute + self.relative * numpy.abs(base), 0.0)
        is_admitted: Mask = sizes <= limits
        return is_admitted

    def __str__(self) -> str:
        return f"{self.absolute:g}" + (f" + {self.relative:g} * |base|" if self.relative else "")


@dataclass(frozen=True, slots=True, eq=False)
class Differences(Sequence[CurveDifference]):
    """The differences of two curves with the same iterations, and of their validation losses, in order of iteration.

    Args:
        evaluations: the differences of validation losses, by iteration.
        iterations: of all differences.
        quantities: of all differences, by their places in `QUANTITIES`; a validation loss comes after them.
    """

    base: Points
    test: Points
    evaluations: Mapping[int, CurveDifference]
    iterations: Integers
    quantities: Integers

    @staticmethod
    def of(base: Points, test: Points, mask: Mask, evaluations: Mapping[int, CurveDifference]) -> Differences:
        """Return the differences where a mask, of shape (quantities, points), is True."""
        quantities, places = mask.nonzero()
        iterations = numpy.concatenate((base.iterations[places], numpy.array([*evaluations], dtype=numpy.int64)))
        quantities = numpy.concatenate((quantities, numpy.full(len(evaluations), len(QUANTITIES))))
        order = numpy.lexsort((quantities, iterations))
        return Differences(base, test, evaluations, iterations[order], quantities[order])

    def __len__(self) -> int:
        return len(self.iterations)

    def __getitem__(self, number: int) -> CurveDifference:  # type: ignore[override]
        iteration, quantity = int(self.iterations[number]), int(self.quantities[number])
        if quantity == len(QUANTITIES):
            return self.evaluations[iteration]
        return _difference_at(self.base, self.test, quantity, int(self.base.iterations.searchsorted(iteration)))


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `compare`.

    Attributes:
        tolerance: None if equal bits were required.
        compared: iterations on both sides.
        differences: values of compared iterations not equal under `tolerance`, by iteration.
        different_iterations: every compared iteration that is unequal, in order.
        evaluated: iterations with a validation loss on both sides. Another one is no difference.
        missing_in_base, missing_in_test: iterations only on the other side, without which curves are not equal.
        unlike: iterations left out, whose losses are means of other numbers of iterations.
        allowed_prefix: iterations before the first of the test side, with leave to be missing there.
        bit_equal: compared iterations whose values are all known to have equal bits.
        largest: the largest difference of two losses, within the tolerance or not; None when all are equal.
    """

    base: Curve
    test: Curve
    tolerance: Tolerance | None
    compared: int
    differences: Differences
    different_iterations: tuple[int, ...]
    missing_in_base: tuple[int, ...]
    missing_in_test: tuple[int, ...]
    allowed_prefix: tuple[int, ...]
    bit_equal: int
    largest: CurveDifference | None
    evaluated: int = 0
    unlike: tuple[int, ...] = ()

    @property
    def equal(self) -> bool:
        return not (self.different_iterations or self.missing_in_base or self.missing_in_test)

    @property
    def bit_identical(self) -> bool:
        """Return whether every compared value is known to be equal bit for bit."""
        return self.equal and self.bit_equal == self.compared

    @property
    def verdict(self) -> str:
        """The last line of a report: the iterations of both sides, then those that one lacks."""
        sides = {"test": self.missing_in_test, "base": self.missing_in_base}
        missing = [f"{len(holes)} in {side} (first at {holes[0]})" for side, holes in sides.items() if holes]
        total = self.compared + (0 if missing else len(self.allowed_prefix))
        suffix = " in both" if missing else ""
        if different := self.different_iterations:
            parts = [f"DIFFERENT: {len(different)} of {total} iterations{suffix}, first at {different[0]}"]
        else:
            relation = "bit-identical" if self.bit_equal == self.compared else f"equal within {self.tolerance}"
            parts = [f"{relation}: {self.compared}/{total} iterations{suffix}"] if total else []
        return "; ".join([*parts, f"MISSING: {', '.join(missing)}"] if missing else parts)


def tolerance_of(base: Curve, test: Curve) -> Tolerance:
    """Return the default tolerance of two curves, that of their common dtype; without a dtype, that of float32."""
    return Tolerance(TOLERANCES[common_dtype(base, test) or "float32"])


def compare(base: Curve, test: Curve, *, tolerance: Tolerance | None, allow_missing_prefix: bool = False) -> Comparison:
    """Compare two curves iteration by iteration.

    A tolerance applies to the losses of training and of validation. With None, these, grad_norm and lr must have equal
    bits wherever both sides have them. Losses that are means of other numbers of iterations are left out.

    Args:
        base: the reference.
        test: the curve under test.
        tolerance: allowed difference of two losses; None requires equal bits.
        allow_missing_prefix: do not count iterations before the first of `test`, as for a resumed run.

    Raises:
        DataError: equal bits are required and a loss is known as a decimal only, or none of the losses are alike.
    """
    unlike = _unlike_iterations(base, test)
    of_base, of_test = (Points.of(curve.points).without(unlike) for curve in (base, test))
    if tolerance is None:
        _require_exact(base.source, of_base)
        _require_exact(test.source, of_test)
    sides = common_points(of_base, of_test)
    common, losses = sides[0].iterations, [points.values[0] for points in sides]
    is_unequal = certainly_differ(*sides)
    evaluations = {
        iteration: CurveDifference(iteration, VALID_LOSS, base.evaluations[iteration], test.evaluations[iteration])
        for iteration in sorted(base.evaluations.keys() & test.evaluations.keys())
    }
    unequal_evaluations = {n: d for n, d in evaluations.items() if _differ(d.base, d.test)}
    if tolerance is None:
        differences = Differences.of(*sides, is_unequal, unequal_evaluations)
    else:
        beyond = {
            n: d
            for n, d in evaluations.items()
            if not tolerance.admits(*map(numpy.array, (d.base.value, d.test.value)))
        }
        differences = Differences.of(*sides, ~tolerance.admits(*losses)[None], beyond)
    missing, missing_in_base = (numpy.setdiff1d(side.iterations, common) for side in (of_base, of_test))
    start = of_test.iterations.min() if len(of_test) else 0
    prefix = int((missing < start).sum()) if allow_missing_prefix else 0
    is_exact = (sides[0].kinds[0] == EXACT) & (sides[1].kinds[0] == EXACT)
    is_equal = is_exact & ~is_unequal.any(axis=0) & ~numpy.isin(common, [*unequal_evaluations])
    sizes = absolute_differences(*losses)
    largest = int(sizes.argmax()) if sizes.size else 0
    return Comparison(
        base=base,
        test=test,
        tolerance=tolerance,
        compared=common.size,
        differences=differences,
        different_iterations=tuple(numpy.unique(differences.iterations).tolist()),
        missing_in_base=tuple(missing_in_base.tolist()),
        missing_in_test=tuple(missing[prefix:].tolist()),
        allowed_prefix=tuple(missing[:prefix].tolist()),
        bit_equal=int(is_equal.sum()),
        largest=_difference_at(*sides, 0, largest) if sizes.size and sizes[largest] > 0 else None,
        evaluated=len(evaluations),
        unlike=tuple(unlike.tolist()),
    )


def _difference_at(base: Points, test: Points, quantity: int, place: int) -> CurveDifference:
    readings = base.reading(quantity, place), test.reading(quantity, place)
    return CurveDifference(int(base.iterations[place]), QUANTITIES[quantity], *readings)


def _unlike_iterations(base: Curve, test: Curve) -> Integers:
    """Return the iterations of both curves whose losses are means of other numbers of iterations."""
    sides = [Points.of(curve.points).iterations for curve in (base, test)]
    common = numpy.intersect1d(sides[0], sides[1]) if base.meaning.is_mean or test.meaning.is_mean else sides[0][:0]
    of_base, of_test = (
        _windows(curve)[iterations.searchsorted(common)] for curve, iterations in zip((base, test), sides, strict=True)
    )
    is_unlike = (of_base != of_test) & (of_base > 0) & (of_test > 0)
    if common.size and is_unlike.all():
        single = (base if base.meaning.is_mean else test).meaning
        raise DataError(
            "The losses are means of other numbers of iterations",
            where=f"{base.source} and {test.source}",
            expected="losses of each iteration on both sides, or means of as many",
            found=f"means of {of_base[-1]} and {of_test[-1]} at iteration {common[-1]}",
            fix=f"Compare a run that logs every iteration (in {single.program}: {single.single}).",
        )
    unlike: Integers = common[is_unlike]
    return unlike


def _windows(curve: Curve) -> Integers:
    """Return how many iterations each loss of a curve is the mean of; 0 if that is unknown."""
    iterations = Points.of(curve.points).iterations
    if not curve.meaning.is_mean:
        return numpy.full(len(iterations), 0 if curve.meaning.is_mean is None else 1)
    steps = numpy.diff(iterations, prepend=0)
    intervals, counts = numpy.unique(steps[1:] if len(steps) > 1 else steps, return_counts=True)
    # A line that is lost widens no mean.
    means: Integers = numpy.minimum(steps, intervals[counts.argmax()])
    return means


def meanings(curves: Mapping[str, Curve]) -> list[str]:
    """Return what the losses of curves mean, by name, a line each; none if all are of metrics.jsonl."""
    is_usual = all(curve.meaning == OURS for curve in curves.values())
    return [] if is_usual else [f"{name}: {meaning_of(curve)}" for name, curve in curves.items()]


def meaning_of(curve: Curve) -> str:
    """Return what the losses of a curve mean, in words."""
    return curve.meaning.describe(int(_windows(curve).max(initial=0)))


def report(comparison: Comparison, *, max_rows: int = 20) -> str:
    """Return a report of the comparison; its last line is the verdict.

    Args:
        comparison: the result of `compare`.
        max_rows: maximum number of listed values, and of ranges of missing iterations.
    """
    lines = [f"base       {described(comparison.base)}", f"test       {described(comparison.test)}"]
    lines += [f"losses     {line}" for line in meanings({"base": comparison.base, "test": comparison.test})]
    lines += [f"note       {note}" for note in comparison.base.notes + comparison.test.notes]
    rule = (
        "equal bits in losses, grad_norm and lr"
        if comparison.tolerance is None
        else f"{comparison.tolerance} on the losses"
    )
    lines.append(f"tolerance  {rule}")
    if comparison.allowed_prefix:
        lines.append(f"allowed    missing at the start of test: {_ranges(comparison.allowed_prefix, max_rows)}")
    if comparison.missing_in_test:
        lines.append(f"missing    in test: {_ranges(comparison.missing_in_test, max_rows)}{_hint(comparison)}")
    if comparison.missing_in_base:
        lines.append(f"missing    in base: {_ranges(comparison.missing_in_base, max_rows)}")
    if comparison.unlike:
        lines.append(f"left out   means of other numbers of iterations: {_ranges(comparison.unlike, max_rows)}")
    lines.append(_bits(comparison))
    if comparison.evaluated:
        lines.append(f"evaluated  at {count_of(comparison.evaluated, 'iteration')} in both: {_validation(comparison)}")
    if comparison.differences:
        lines += ["", *_table([*islice(comparison.differences, max_rows)])]
        if len(comparison.differences) > max_rows:
            lines.append(f"... and {len(comparison.differences) - max_rows} more")
        lines.append("")
    if (largest := comparison.largest) is not None:
        values = f"base {largest.base.value!r}, test {largest.test.value!r}"
        lines.append(f"largest    loss difference {largest.size:.3e} at iteration {largest.iteration} ({values})")
    return "\n".join([*lines, comparison.verdict])


def common_dtype(base: Curve, test: Curve) -> str | None:
    """Return the coarser dtype of two runs, None if neither config names a dtype."""
    dtypes = {base.dtype, test.dtype} - {None}
    return "bfloat16" if "bfloat16" in dtypes else next(iter(dtypes), None)


def _require_exact(source: str, points: Points) -> None:
    is_exact = points.kinds[0] == EXACT
    if not is_exact.all():
        raise DataError(
            "Equal bits cannot be proved from decimals",
            where=f"{source}, iteration {points.iterations[is_exact.argmin()]}",
            expected="loss_hex in every record",
            fix="Compare the metrics.jsonl of both runs, or drop --bitwise.",
        )


def _differ(base: Reading, test: Reading) -> bool:
    """Return whether two readings certainly differ: exact bits beside a decimal prove nothing, unless either is not
    finite.
    """
    if base.value.hex() == test.value.hex():
        return False
    return base.exact == test.exact or not (math.isfinite(base.value) and math.isfinite(test.value))


def described(curve: Curve) -> str:
    """Return the file, the iterations and the dtype of a curve in words."""
    first, last = curve.points[0].iteration, curve.points[-1].iteration
    dtype = curve.dtype or "dtype unknown, taken as float32"
    return f"{curve.source}: {count_of(len(curve.points), 'iteration')}, {first} to {last}, {dtype}"


def _hint(comparison: Comparison) -> str:
    if comparison.missing_in_test[0] < comparison.test.points[0].iteration:
        return " (--allow-missing-prefix allows iterations missing before the first one of test)"
    return ""


def _bits(comparison: Comparison) -> str:
    if not all((Points.of(curve.points).kinds[0] == EXACT).all() for curve in (comparison.base, comparison.test)):
        return "bits       not compared: decimals cannot prove equal bits"
    return f"bits       loss, grad_norm and lr are equal at {comparison.bit_equal} of {comparison.compared} iterations"


def _validation(comparison: Comparison) -> str:
    """Return how the validation losses compare, in words."""
    if count := len(comparison.differences.evaluations):
        return f"{count} validation losses differ"
    return "the validation losses are equal" + (f" within {comparison.tolerance}" if comparison.tolerance else "")


def _ranges(iterations: tuple[int, ...], limit: int) -> str:
    """Format ascending integers as `1-40, 43`."""
    runs: list[list[int]] = []
    for iteration in iterations:
        if runs and iteration == runs[-1][1] + 1:
            runs[-1][1] = iteration
        else:
            runs.append([iteration, iteration])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:limit]]
    left_out = len(runs) - len(texts)
    return ", ".join([*texts, f"and {left_out} more ranges"] if left_out else texts) + f" ({len(iterations)} in all)"


def _table(differences: Sequence[CurveDifference]) -> list[str]:
    rows = [("iteration", "quantity", "base", "test", "difference", "ulps")]
    rows += [
        (str(row.iteration), row.quantity, repr(row.base.value), repr(row.test.value), f"{row.size:.3e}", _ulps(row))
        for row in differences
    ]
    return format_table(rows, align=">")


def _ulps(difference: CurveDifference) -> str:
    """Return the number of floats between two exact values, 32-bit ones if both values are such; `-` if unknown."""
    values = numpy.array([difference.base.value, difference.test.value])
    if not (difference.base.exact and difference.test.exact and numpy.isfinite(values).all()):
        return "-"
    with numpy.errstate(over="ignore"):
        narrow = values.astype(numpy.float32)
    floats, bits = (narrow, 32) if (narrow == values).all() else (values, 64)
    # The bits of an IEEE 754 number, read as sign and magnitude, are in the order of the numbers.
    magnitudes = numpy.abs(floats).view(f"i{bits // 8}").tolist()
    first, second = (int(math.copysign(1, value)) * size for value, size in zip(values, magnitudes, strict=True))
    return f"{abs(first - second)} (float{bits})"
