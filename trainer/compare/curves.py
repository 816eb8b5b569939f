"""Compares two loss curves value by value, and reports the result in words."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reprise.errors import DataError, count_of
from trainer.compare.formats import OURS
from trainer.compare.points import Curve, CurveDifference, Reading, absolute_difference
from trainer.compare.read import VALID_LOSS
from trainer.compare.text_table import format_table

if TYPE_CHECKING:
    from trainer.compare.columns import Integers, Points
    from trainer.compare.differences import Differences

# Absolute, by dtype.
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Losses a (base) and b (test) are equal when |a - b| <= absolute + relative * |a|."""

    absolute: float
    relative: float = 0.0

    def admits(self, base: float, test: float) -> bool:
        """Return whether two losses are equal; an infinity or nan equals only itself."""
        if not (math.isfinite(base) and math.isfinite(test)):
            return absolute_difference(base, test) == 0
        return abs(base - test) <= self.absolute + self.relative * abs(base)

    def __str__(self) -> str:
        return f"{self.absolute:g}" + (f" + {self.relative:g} * |base|" if self.relative else "")


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
    from trainer.compare.columns import absolute_differences, beyond, common_points, missing_iterations, unequal
    from trainer.compare.differences import Differences, difference_at

    of_base, of_test, unlike = _alike_points(base, test)
    if tolerance is None:
        _require_exact(base.source, of_base)
        _require_exact(test.source, of_test)
    sides = common_points(of_base, of_test)
    common = sides[0].iterations
    is_unequal = unequal(*sides)
    losses = sides[0].values[:1], sides[1].values[:1]
    sizes = absolute_differences(*losses)[0]
    evaluated = sorted(base.evaluations.keys() & test.evaluations.keys())
    evaluations = [CurveDifference(n, VALID_LOSS, base.evaluations[n], test.evaluations[n]) for n in evaluated]
    unequal_evaluations = [d for d in evaluations if _differ(d.base, d.test)]
    if tolerance is None:
        differences = Differences.of(*sides, is_unequal, unequal_evaluations, apart=True)
    else:
        is_beyond = beyond(*losses, absolute=tolerance.absolute, relative=tolerance.relative)
        beyond_it = [d for d in evaluations if not tolerance.admits(d.base.value, d.test.value)]
        differences = Differences.of(*sides, is_beyond, beyond_it)
    missing, missing_in_base = missing_iterations(of_base, common), missing_iterations(of_test, common)
    start = of_test.iterations.min() if len(of_test) else 0
    prefix = int((missing < start).sum()) if allow_missing_prefix else 0
    is_equal = sides[0].exact[0] & sides[1].exact[0] & ~is_unequal.any(axis=0)
    for difference in unequal_evaluations:
        place = common.searchsorted(difference.iteration)
        is_equal[place : place + 1] &= common[place : place + 1] != difference.iteration
    largest = int(sizes.argmax()) if sizes.size else 0
    return Comparison(
        base=base,
        test=test,
        tolerance=tolerance,
        compared=common.size,
        differences=differences,
        different_iterations=differences.distinct_iterations(),
        missing_in_base=tuple(missing_in_base.tolist()),
        missing_in_test=tuple(missing[prefix:].tolist()),
        allowed_prefix=tuple(missing[:prefix].tolist()),
        bit_equal=int(is_equal.sum()),
        largest=difference_at(*sides, 0, largest) if sizes.size and sizes[largest] > 0 else None,
        evaluated=len(evaluated),
        unlike=tuple(unlike.tolist()),
    )


def _alike_points(base: Curve, test: Curve) -> tuple[Points, Points, Integers]:
    """Return the points of curves without those whose losses are means of other numbers of iterations, and these."""
    from trainer.compare.columns import Points, common_points, windows

    points = Points.of(base.points), Points.of(test.points)
    if not (base.meaning.is_mean or test.meaning.is_mean):
        return *points, points[0].iterations[:0]
    common = common_points(*points)[0].iterations
    of_base, of_test = (
        windows(curve)[columns.iterations.searchsorted(common)]
        for curve, columns in zip((base, test), points, strict=True)
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
    return points[0].without(unlike), points[1].without(unlike), unlike


def meanings(curves: Mapping[str, Curve]) -> list[str]:
    """Return what the losses of curves mean, by name, a line each; none if all are of metrics.jsonl."""
    is_usual = all(curve.meaning == OURS for curve in curves.values())
    return [] if is_usual else [f"{name}: {meaning_of(curve)}" for name, curve in curves.items()]


def meaning_of(curve: Curve) -> str:
    """Return what the losses of a curve mean, in words."""
    from trainer.compare.columns import windows

    return curve.meaning.describe(int(windows(curve).max(initial=0)))


def report(comparison: Comparison, *, max_rows: int = 20) -> str:
    """Return a report of the comparison; its last line is the verdict.

    Args:
        comparison: the result of `compare`.
        max_rows: maximum number of listed values, and of ranges of missing iterations.
    """
    lines = [_about("base", comparison.base), _about("test", comparison.test)]
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
        lines += ["", *_table(comparison.differences[:max_rows])]
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


def ulp_distance(base: float, test: float, *, bits: int) -> int | None:
    """Return the number of floats of 32 or 64 bits between two values; None for a nan.

    The bits of an IEEE 754 number, read as sign and magnitude, are in the order of the numbers; -0.0 is 0 from 0.0.

    Raises:
        OverflowError: a value is out of the range of a 32-bit float.
    """
    if math.isnan(base) or math.isnan(test):
        return None
    float_code, integer_code = {32: ("<f", "<i"), 64: ("<d", "<q")}[bits]
    ordered = []
    for value in (base, test):
        (magnitude,) = struct.unpack(integer_code, struct.pack(float_code, abs(value)))
        ordered.append(int(math.copysign(1, value)) * int(magnitude))
    return abs(ordered[0] - ordered[1])


def fits_float32(value: float) -> bool:
    """Return whether a value is exactly a 32-bit float (nan and inf are)."""
    try:
        (narrow,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        return False
    return bool(narrow == value) or math.isnan(value)


def _require_exact(source: str, points: Points) -> None:
    if not points.exact[0].all():
        raise DataError(
            "Equal bits cannot be proved from decimals",
            where=f"{source}, iteration {points.iterations[points.exact[0].argmin()]}",
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


def _about(side: str, curve: Curve) -> str:
    first, last = curve.points[0].iteration, curve.points[-1].iteration
    dtype = curve.dtype or "dtype unknown, taken as float32"
    return f"{side}       {curve.source}: {count_of(len(curve.points), 'iteration')}, {first} to {last}, {dtype}"


def _hint(comparison: Comparison) -> str:
    if comparison.missing_in_test[0] < comparison.test.points[0].iteration:
        return " (--allow-missing-prefix allows iterations missing before the first one of test)"
    return ""


def _bits(comparison: Comparison) -> str:
    from trainer.compare.columns import Points

    if not all(Points.of(curve.points).exact[0].all() for curve in (comparison.base, comparison.test)):
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
    base, test = difference.base.value, difference.test.value
    if not (difference.base.exact and difference.test.exact and math.isfinite(base) and math.isfinite(test)):
        return "-"
    bits = 32 if fits_float32(base) and fits_float32(test) else 64
    steps = ulp_distance(base, test, bits=bits)
    return "-" if steps is None else f"{steps} (float{bits})"
