"""Draws several runs' loss curves over their base, and the differences below."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from trainer.compare.curves import Comparison, Curve
from trainer.compare.evaluations import Series, metrics_of
from trainer.compare.figure import BASE_COLOR, COLORS, make_figure, write_figure
from trainer.compare.table import short_verdict
from trainer.metrics.log_file import Floats, Integers

_DIFFERENCE_COLOR = "#444444"
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1.5, 1.5)))
_BASE_STYLE = {"color": BASE_COLOR, "linewidth": 6.0}


def plot_comparisons(
    comparisons: Sequence[Comparison],
    names: Sequence[str],
    path: str | Path,
    *,
    evaluations: Sequence[Mapping[str, Series]] = (),
) -> None:
    """Write the figure from `draw_comparisons`. The path's suffix determines the format.

    Raises:
        TrainerError: matplotlib is not installed, or the picture cannot be written.
    """
    write_figure(draw_comparisons(comparisons, names, evaluations=evaluations), path)


def draw_comparisons(
    comparisons: Sequence[Comparison], names: Sequence[str], *, evaluations: Sequence[Mapping[str, Series]] = ()
) -> Any:
    """Draw the runs' losses over their base, and each run's difference from the base below.

    Equal curves stay visible: each is thinner than the curve under it, and they differ in color and style. The
    difference axis is logarithmic down to the smallest difference, and linear from there to 0. Infinite and NaN losses
    are marked at the lower edge, nonfinite differences at the upper edge.

    Args:
        comparisons: Results from `compare`, all with the same base.
        names: The base's name, then the test runs' names in order.
        evaluations: Each run's metrics, in order. Each metric gets a panel below.

    Raises:
        TrainerError: matplotlib is not installed.
    """
    metrics, single = metrics_of(evaluations), comparisons[0] if len(comparisons) == 1 else None
    figure = make_figure(height=7.5 + 2 * len(metrics))
    upper, lower, *panels = figure.subplots(2 + len(metrics), 1, sharex=True, height_ratios=(3, 2, *[2] * len(metrics)))
    equal = sum(comparison.equal for comparison in comparisons)
    title = single.verdict if single else f"{equal} of {len(comparisons)} runs are equal to {names[0]}"
    figure.suptitle(title, fontsize=13)
    styles = [_BASE_STYLE, *(_style(number, len(comparisons)) for number in range(len(comparisons)))]
    _draw_curve(upper, comparisons[0].base, f"{names[0]} (base)", styles[0])
    sizes = [comparison.points.sizes for comparison in comparisons]
    for comparison, name, style, differences in zip(comparisons, names[1:], styles[1:], sizes, strict=True):
        _draw_curve(upper, comparison.test, f"{name}: {short_verdict(comparison)}", style)
        _draw_sizes(lower, comparison.points.base.iterations, differences, style)
    for axes, metric in zip(panels, metrics, strict=True):
        _draw_metric(axes, metric, evaluations, styles)
    limit = single.tolerance.absolute if single and single.tolerance else 0.0
    if limit > 0:
        lower.axhline(limit, color=_DIFFERENCE_COLOR, linestyle="--", linewidth=1)
    _scale_differences(lower, numpy.concatenate(sizes), limit)
    upper.set_ylabel("training loss")
    lower.set_ylabel(f"|loss - loss of {names[0]}|")
    lower.set_xlabel("iteration")
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
    figure.legend(*upper.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.align_ylabels()
    return figure


def _draw_metric(
    axes: Any, metric: str, evaluations: Sequence[Mapping[str, Series]], styles: Sequence[dict[str, Any]]
) -> None:
    """Draw a metric measured on each run's checkpoints, in the style of the run's loss curve."""
    for metrics, style in zip(evaluations, styles, strict=True):
        series = sorted(metrics.get(metric, {}).items())
        axes.plot(*zip(*series, strict=True) if series else ([], []), marker="o", **style)
    axes.set_title(metric, fontsize=10)
    axes.set_xlabel("iteration")
    axes.grid(alpha=0.25)


def _style(number: int, total: int) -> dict[str, Any]:
    """Return a test run's line style. Later runs get thinner lines, from 3.8 to 1.2 points."""
    return {
        "color": COLORS[number % len(COLORS)],
        "linestyle": _DASHES[number % len(_DASHES)],
        "linewidth": 3.8 - 2.6 * number / max(1, total - 1),
        "zorder": 3 + number,
    }


def _draw_curve(axes: Any, curve: Curve, label: str, style: dict[str, Any]) -> None:
    iterations, losses = curve.points.iterations, curve.points.values[0]
    is_finite = numpy.isfinite(losses)
    marker = "o" if len(iterations) == 1 else None
    axes.plot(iterations, numpy.where(is_finite, losses, math.nan), label=label, marker=marker, **style)
    _mark(axes, iterations[~is_finite], f"nan or inf in {label.partition(':')[0]}", style["color"], 0.04)


def _draw_sizes(axes: Any, iterations: Integers, sizes: Floats, style: dict[str, Any]) -> None:
    is_finite = numpy.isfinite(sizes)
    if (sizes[is_finite] > 0).any():  # differences rarely coincide, and dashes would hide details
        style = {**style, "linestyle": "-", "linewidth": 1.2}
    marker = "o" if len(sizes) == 1 else None
    axes.plot(iterations, numpy.where(is_finite, sizes, math.nan), marker=marker, **style)
    _mark(axes, iterations[~is_finite], "not finite and not the same", style["color"], 0.94)


def _scale_differences(axes: Any, sizes: Floats, limit: float) -> None:
    """Scale the difference axis to these sizes, and to the tolerance if it is not 0."""
    levels = [*sizes[(sizes > 0) & numpy.isfinite(sizes)].tolist()]
    if not levels:
        axes.set_ylim(-0.5, 1)
        axes.set_yticks([0])
        text = "every compared loss is the same" if (sizes == 0).any() else "no difference has a size"
        axes.text(0.5, 0.7, text, transform=axes.transAxes, ha="center", va="center", color=_DIFFERENCE_COLOR)
        return
    levels += [limit] if limit else []
    low, high = math.floor(math.log10(min(levels))), math.ceil(math.log10(max(levels)))
    axes.set_yscale("symlog", linthresh=10.0**low, linscale=0.6)
    axes.set_ylim(-0.4 * 10.0**low, 2 * 10.0**high)
    axes.set_yticks([0.0, *(10.0**decade for decade in range(low, high + 1, math.ceil((high - low + 1) / 6)))])
    axes.set_yticks([], minor=True)


def _mark(axes: Any, iterations: Integers, label: str, color: str, height: float) -> None:
    if iterations.size:
        edge = axes.get_xaxis_transform()
        axes.plot(iterations, [height] * iterations.size, "x", transform=edge, color=color, label=label)
