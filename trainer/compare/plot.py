"""Draws loss curves over each other, and their differences below."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.compare.curves import Comparison, Tolerance
from trainer.compare.evaluations import Series, metrics_of
from trainer.compare.figure import BASE_COLOUR, COLOURS, make_figure, write_figure
from trainer.compare.points import Curve, absolute_difference
from trainer.compare.table import short_verdict

_BASE_COLOUR, _TEST_COLOUR, _DIFFERENCE_COLOUR = "#8fbbdb", "#d95f02", "#444444"
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1.5, 1.5)))


def plot_comparison(
    comparison: Comparison,
    path: str | Path,
    *,
    names: tuple[str, str] | None = None,
    evaluations: Sequence[Mapping[str, Series]] = (),
) -> None:
    """Draw both losses and, on a logarithmic axis, their absolute difference; the suffix of `path` is the format.

    Infinite and nan losses are marked at the lower edge, such differences at the upper. Differences of 0 do not appear
    on a logarithmic axis: the panel's title has their number.

    Args:
        names: of the base and of the test run; None for their paths.
        evaluations: the metrics of the base and of the test run; each metric has a panel below.

    Raises:
        TrainerError: matplotlib is not installed, or the picture cannot be written.
    """
    metrics = metrics_of(evaluations)
    figure = make_figure(height=7 + 2 * len(metrics))
    upper, lower, *panels = figure.subplots(2 + len(metrics), 1, sharex=True, height_ratios=(2, 1, *[1] * len(metrics)))
    figure.suptitle(comparison.verdict, fontsize=13)
    names = names or (_path(comparison.base), _path(comparison.test))
    _draw_losses(upper, comparison, names)
    _draw_differences(lower, comparison)
    styles = [{"color": _BASE_COLOUR, "linewidth": 4.0}, {"color": _TEST_COLOUR, "linewidth": 1.2}]
    for axes, metric in zip(panels, metrics, strict=True):
        _draw_metric(axes, metric, evaluations, styles)
    figure.align_ylabels()
    write_figure(figure, path)


def plot_comparisons(
    comparisons: Sequence[Comparison],
    names: Sequence[str],
    path: str | Path,
    *,
    evaluations: Sequence[Mapping[str, Series]] = (),
) -> None:
    """Write the figure of `draw_comparisons`; the suffix of `path` is the format.

    Raises:
        TrainerError: matplotlib is not installed, or the picture cannot be written.
    """
    write_figure(draw_comparisons(comparisons, names, evaluations=evaluations), path)


def draw_comparisons(
    comparisons: Sequence[Comparison], names: Sequence[str], *, evaluations: Sequence[Mapping[str, Series]] = ()
) -> Any:
    """Draw the losses of several runs over their base, and the difference of each from the base below.

    Equal curves stay visible: each is thinner than the curve under it, and they differ in color and style. The axis of
    the differences is logarithmic down to the smallest of them and linear from there to 0. Infinite and nan losses are
    marked at the lower edge, such differences at the upper.

    Args:
        comparisons: results of `compare`, all with the same base.
        names: of the base and of the test runs, in order.
        evaluations: the metrics of the runs, in order; each metric has a panel below.

    Raises:
        TrainerError: matplotlib is not installed.
    """
    metrics = metrics_of(evaluations)
    figure = make_figure(height=7.5 + 2 * len(metrics))
    upper, lower, *panels = figure.subplots(2 + len(metrics), 1, sharex=True, height_ratios=(3, 2, *[2] * len(metrics)))
    equal = sum(comparison.equal for comparison in comparisons)
    figure.suptitle(f"{equal} of {len(comparisons)} runs are equal to {names[0]}", fontsize=13)
    _draw_curve(upper, comparisons[0].base, f"{names[0]} (base)", {"color": BASE_COLOUR, "linewidth": 6.0})
    for number, (comparison, name) in enumerate(zip(comparisons, names[1:], strict=True)):
        style = _style(number, len(comparisons))
        _draw_curve(upper, comparison.test, f"{name}: {short_verdict(comparison)}", style)
        _draw_sizes(lower, _sizes(comparison), style)
    base_style = {"color": BASE_COLOUR, "linewidth": 6.0}
    styles = [base_style, *(_style(number, len(comparisons)) for number in range(len(comparisons)))]
    for axes, metric in zip(panels, metrics, strict=True):
        _draw_metric(axes, metric, evaluations, styles)
    _scale_differences(lower, [size for comparison in comparisons for size in _sizes(comparison).values()])
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
    """Draw what was measured of the checkpoints of each run, in the styles of their losses."""
    for metrics, style in zip(evaluations, styles, strict=True):
        series = metrics.get(metric, {})
        axes.plot(sorted(series), [series[iteration] for iteration in sorted(series)], marker="o", **style)
    axes.set_title(metric, fontsize=10)
    axes.set_xlabel("iteration")
    axes.grid(alpha=0.25)


def _style(number: int, total: int) -> dict[str, Any]:
    """Return the line style of a test run: later runs are thinner, from 3.8 to 1.2 points."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": _DASHES[number % len(_DASHES)],
        "linewidth": 3.8 - 2.6 * number / max(1, total - 1),
        "zorder": 3 + number,
    }


def _draw_curve(axes: Any, curve: Curve, label: str, style: dict[str, Any]) -> None:
    iterations, losses = _finite_runs(curve)
    axes.plot(iterations, losses, label=label, marker="o" if len(curve.points) == 1 else None, **style)
    broken = [point.iteration for point in curve.points if not math.isfinite(point.loss.value)]
    _mark(axes, broken, label=f"nan or inf in {label.partition(':')[0]}", colour=style["color"])


def _draw_sizes(axes: Any, sizes: dict[int, float], style: dict[str, Any]) -> None:
    heights = [size if size < math.inf else math.nan for size in sizes.values()]
    if any(height > 0 for height in heights):  # not on top of another: dashes would only hide what they show
        style = {**style, "linestyle": "-", "linewidth": 1.2}
    axes.plot(list(sizes), heights, marker="o" if len(sizes) == 1 else None, **style)
    endless = [iteration for iteration, size in sizes.items() if math.isinf(size)]
    _mark(axes, endless, label="not finite and not the same", colour=style["color"], height=0.94)


def _scale_differences(axes: Any, sizes: Sequence[float]) -> None:
    finite = [size for size in sizes if 0 < size < math.inf]
    if not finite:
        axes.set_ylim(-0.5, 1)
        axes.set_yticks([0])
        text = "every compared loss is the same" if any(size == 0 for size in sizes) else "no difference has a size"
        axes.text(0.5, 0.7, text, transform=axes.transAxes, ha="center", va="center", color=_DIFFERENCE_COLOUR)
        return
    least, most = 10.0 ** math.floor(math.log10(min(finite))), 10.0 ** math.ceil(math.log10(max(finite)))
    axes.set_yscale("symlog", linthresh=least, linscale=0.6)
    axes.set_ylim(-0.4 * least, most * 2)
    decades = range(round(math.log10(least)), round(math.log10(most)) + 1)
    every = max(1, math.ceil(len(decades) / 6))
    axes.set_yticks([0.0, *(10.0**decade for decade in decades[::every])])
    axes.set_yticks([], minor=True)


def _sizes(comparison: Comparison) -> dict[int, float]:
    """Return the difference of the losses of every common iteration, by iteration."""
    test = {point.iteration: point.loss.value for point in comparison.test.points}
    return {
        point.iteration: absolute_difference(point.loss.value, test[point.iteration])
        for point in comparison.base.points
        if point.iteration in test
    }


def _draw_losses(axes: Any, comparison: Comparison, names: tuple[str, str]) -> None:
    base, test = names
    for curve, label, colour, width in (
        (comparison.base, f"base: {base}", _BASE_COLOUR, 4.0),
        (comparison.test, f"test: {test}", _TEST_COLOUR, 1.2),
    ):
        _draw_curve(axes, curve, label, {"color": colour, "linewidth": width})
    axes.set_ylabel("training loss")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)


def _draw_differences(axes: Any, comparison: Comparison) -> None:
    sizes = _sizes(comparison)
    finite = {iteration: size for iteration, size in sizes.items() if 0 < size < math.inf}
    axes.set_xlabel("iteration")
    axes.set_ylabel("|base - test|")
    zeros = sum(size == 0 for size in sizes.values())
    axes.set_title(f"absolute difference ({zeros} of {len(sizes)} are exactly 0)", fontsize=10)
    endless = [iteration for iteration, size in sizes.items() if math.isinf(size)]
    if not finite and not endless:
        text = "every compared loss is the same" if sizes else "no iteration in common"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=_DIFFERENCE_COLOUR)
        axes.set_yticks([])
        return
    if finite:
        axes.set_yscale("log")
        axes.plot(list(finite), list(finite.values()), ".", color=_DIFFERENCE_COLOUR, label="difference")
        _draw_tolerance(axes, comparison.tolerance, finite)
    else:
        axes.set_yticks([])
    _mark(axes, endless, label="not finite and not the same", colour=_TEST_COLOUR, height=0.94)
    axes.legend(frameon=False, loc="best")
    axes.grid(alpha=0.25)


def _draw_tolerance(axes: Any, tolerance: Tolerance | None, finite: dict[int, float]) -> None:
    """Draw the absolute tolerance as a line, and keep both it and the differences off the edges."""
    levels = list(finite.values())
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
    """Return the line to draw, interrupted by nan at infinite losses."""
    values = [point.loss.value for point in curve.points]
    return [p.iteration for p in curve.points], [value if math.isfinite(value) else math.nan for value in values]


def _path(curve: Curve) -> str:
    return curve.source if len(curve.source) <= 60 else "..." + curve.source[-57:]
