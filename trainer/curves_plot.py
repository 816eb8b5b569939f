"""Draw two loss curves over each other, and their difference below.

matplotlib is imported when something is drawn, so nothing else needs it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from trainer.curves import Comparison, Curve, Tolerance, absolute_difference
from trainer.errors import TrainerError

_BASE_COLOUR, _TEST_COLOUR, _DIFFERENCE_COLOUR = "#8fbbdb", "#d95f02", "#444444"


def plot_comparison(comparison: Comparison, path: str | Path) -> None:
    """Draw both losses and, on a logarithmic axis, their absolute difference; the suffix of `path` chooses the format.

    A loss that is not finite is marked at the lower edge, a difference without a size at the upper. Differences of 0
    have no place on a logarithmic axis: their number is in the title of the panel.

    Raises:
        TrainerError: matplotlib is not installed, or the picture cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TrainerError("A plot needs matplotlib", fix="Install it with: pip install 'reprise[plot]'") from error
    figure = Figure(figsize=(10, 7), dpi=120, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    figure.suptitle(comparison.verdict, fontsize=13)
    _draw_losses(upper, comparison)
    _draw_differences(lower, comparison)
    figure.align_ylabels()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise TrainerError("Cannot write the plot", where=path, found=error) from error


def _draw_losses(axes: Any, comparison: Comparison) -> None:
    base, test = _name(comparison.base, "base"), _name(comparison.test, "test")
    for curve, label, colour, width in (
        (comparison.base, base, _BASE_COLOUR, 4.0),
        (comparison.test, test, _TEST_COLOUR, 1.2),
    ):
        iterations, losses = _finite_runs(curve)
        marker = "o" if len(curve.points) == 1 else None
        axes.plot(iterations, losses, label=label, marker=marker, color=colour, linewidth=width)
        broken = [point.iteration for point in curve.points if not math.isfinite(point.loss.value)]
        _mark(axes, broken, label=f"nan or inf in {label.partition(':')[0]}", colour=colour)
    axes.set_ylabel("training loss")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)


def _draw_differences(axes: Any, comparison: Comparison) -> None:
    test = {point.iteration: point.loss.value for point in comparison.test.points}
    sizes = {
        point.iteration: absolute_difference(point.loss.value, test[point.iteration])
        for point in comparison.base.points
        if point.iteration in test
    }
    shown = {iteration: size for iteration, size in sizes.items() if 0 < size < math.inf}
    axes.set_xlabel("iteration")
    axes.set_ylabel("|base - test|")
    zeros = sum(size == 0 for size in sizes.values())
    axes.set_title(f"absolute difference ({zeros} of {len(sizes)} are exactly 0)", fontsize=10)
    endless = [iteration for iteration, size in sizes.items() if math.isinf(size)]
    if not shown and not endless:
        text = "every compared loss is the same" if sizes else "no iteration in common"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=_DIFFERENCE_COLOUR)
        axes.set_yticks([])
        return
    if shown:
        axes.set_yscale("log")
        axes.plot(list(shown), list(shown.values()), ".", color=_DIFFERENCE_COLOUR, label="difference")
        _draw_tolerance(axes, comparison.tolerance, shown)
    else:
        axes.set_yticks([])
    _mark(axes, endless, label="not finite and not the same", colour=_TEST_COLOUR, height=0.94)
    axes.legend(frameon=False, loc="best")
    axes.grid(alpha=0.25)


def _draw_tolerance(axes: Any, tolerance: Tolerance | None, shown: dict[int, float]) -> None:
    """Draw the absolute tolerance as a line, and keep both it and the differences off the edges."""
    levels = list(shown.values())
    if tolerance is not None and tolerance.absolute > 0:
        axes.axhline(
            tolerance.absolute,
            color=_TEST_COLOUR,
            linestyle="--",
            linewidth=1,
            label=f"tolerance {tolerance.absolute:g}",
        )
        levels.append(tolerance.absolute)
    axes.set_ylim(min(levels) / 4, max(levels) * 4)


def _mark(axes: Any, iterations: list[int], *, label: str, colour: str, height: float = 0.04) -> None:
    if iterations:
        edge = axes.get_xaxis_transform()
        axes.plot(iterations, [height] * len(iterations), "x", transform=edge, color=colour, label=label)


def _finite_runs(curve: Curve) -> tuple[list[int], list[float]]:
    """Give the line to draw, broken (by nan) at losses that are not finite."""
    values = [point.loss.value for point in curve.points]
    return [p.iteration for p in curve.points], [value if math.isfinite(value) else math.nan for value in values]


def _name(curve: Curve, side: str) -> str:
    return f"{side}: {curve.source if len(curve.source) <= 60 else '...' + curve.source[-57:]}"
