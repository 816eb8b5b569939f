"""Draws several runs' loss curves over their base, and the differences below. Imports matplotlib when it draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from reprise.errors import TrainerError
from trainer.compare.curves import Comparison
from trainer.metrics.log_file import Floats, Integers

# Colors distinguishable with any common color blindness: M. Okabe and K. Ito, Color Universal Design, 2008. Their
# yellow is omitted because it is too light for a line on white. Lines also differ in style.
_COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1.5, 1.5)))
_BASE_STYLE = {"color": "#b0b0b0", "linewidth": 6.0}


def draw_comparisons(comparisons: Sequence[Comparison], names: Sequence[str]) -> Any:
    """Draw the runs' losses over their base, and each run's difference from the base below.

    Equal curves stay visible: each is thinner than the curve under it, and they differ in color and style. The
    difference axis is logarithmic down to the smallest difference, and linear from there to 0.

    Args:
        comparisons: Results from `compare`, all with the same base.
        names: The base's name, then the test runs' names in order.
    """
    from matplotlib.figure import Figure

    single = comparisons[0] if len(comparisons) == 1 else None
    figure = Figure(figsize=(10, 7.5), dpi=120, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    equal = sum(comparison.equal for comparison in comparisons)
    title = single.verdict if single else f"{equal} of {len(comparisons)} runs are equal to {names[0]}"
    figure.suptitle(title, fontsize=13)
    styles = [_BASE_STYLE, *(_style(number, len(comparisons)) for number in range(len(comparisons)))]
    base, sizes = comparisons[0].base.points, [comparison.points.sizes for comparison in comparisons]
    _draw(upper, base.iterations, base.values[0], styles[0], label=f"{names[0]} (base)")
    for comparison, name, style, differences in zip(comparisons, names[1:], styles[1:], sizes, strict=True):
        points = comparison.test.points
        _draw(upper, points.iterations, points.values[0], style, label=f"{name}: {comparison.verdict}")
        _draw(lower, comparison.points.base.iterations, differences, style)
    if single and single.tolerance and single.tolerance.absolute:
        lower.axhline(single.tolerance.absolute, color="#444444", linestyle="--", linewidth=1)
    everything = numpy.concatenate(sizes)
    if (visible := everything[(everything > 0) & numpy.isfinite(everything)]).size:
        least = 10.0 ** math.floor(math.log10(visible.min()))
        lower.set_yscale("symlog", linthresh=least, linscale=0.6)
        lower.set_ylim(bottom=-0.4 * least)
    upper.set_ylabel("training loss (x: not finite)")
    lower.set_ylabel(f"|loss - loss of {names[0]}|")
    for axes in (upper, lower):
        axes.set_xlabel("iteration")
        axes.grid(alpha=0.25)
    figure.legend(*upper.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.align_ylabels()
    return figure


def write_figure(figure: Any, path: str | Path) -> None:
    """Write a figure to a file. The suffix determines the format.

    Raises:
        TrainerError: The file cannot be written, or the format is not supported.
    """
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise TrainerError("Cannot write the plot", where=path, found=error) from error


def _style(number: int, total: int) -> dict[str, Any]:
    """Return a test run's line style. Later runs get thinner lines, from 3.8 to 1.2 points."""
    return {
        "color": _COLORS[number % len(_COLORS)],
        "linestyle": _DASHES[number % len(_DASHES)],
        "linewidth": 3.8 - 2.6 * number / max(1, total - 1),
        "zorder": 3 + number,
    }


def _draw(axes: Any, iterations: Integers, values: Floats, style: dict[str, Any], *, label: str = "") -> None:
    """Draw a curve, and mark its nonfinite values at the lower edge."""
    is_finite = numpy.isfinite(values)
    marker = "o" if len(values) == 1 else None
    axes.plot(iterations, numpy.where(is_finite, values, math.nan), label=label, marker=marker, **style)
    gaps = iterations[~is_finite]
    axes.plot(gaps, numpy.full(gaps.size, 0.04), "x", transform=axes.get_xaxis_transform(), color=style["color"])
