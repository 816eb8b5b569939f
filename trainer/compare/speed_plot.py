"""Draws the runs' speed over their iterations, and each run's spread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from trainer.compare.figure import COLORS, make_figure, write_figure
from trainer.compare.speed import Row, Timing


def plot_speeds(runs: Sequence[Row], timings: Sequence[Timing], path: str | Path) -> None:
    """Draw tokens per second: by iteration, with the running median and the saves, and each run's spread.

    Args:
        runs: The runs' figures from `summarize_speeds`.
        timings: The timings behind the figures, in the same order.
        path: The picture file. The suffix determines the format.

    Raises:
        TrainerError: matplotlib is not installed, or the picture cannot be written.
    """
    figure = make_figure(height=5 + 0.45 * len(runs))
    upper, lower = figure.subplots(2, 1, height_ratios=(4, 0.6 + 0.45 * len(runs)))
    for number, (run, timing) in enumerate(zip(runs, timings, strict=True)):
        color = COLORS[number % len(COLORS)]
        _draw_iterations(upper, timing, run["run"], color, height=0.03 + 0.04 * number)
        _draw_spread(lower, run, color)
    upper.set_xlabel("iteration (x: saved)")
    upper.set_ylabel("tok/s, and running median")
    upper.set_ylim(bottom=0)
    upper.grid(alpha=0.25)
    lower.set_xlabel("tok/s: median, and from the slowest to the fastest tenth")
    lower.set_xlim(left=0, right=1.4 * max(run["tokens_per_second"]["p90"] for run in runs))
    lower.invert_yaxis()
    lower.grid(alpha=0.25, axis="x")
    figure.legend(*upper.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    write_figure(figure, path)


def running_median(values: Sequence[float]) -> list[float]:
    """Return each value's local median. The window covers about 5% of the values, and at least 5."""
    half = max(2, len(values) // 40)
    return [median(values[max(0, at - half) : at + half + 1]) for at in range(len(values))]


def _draw_iterations(axes: Any, timing: Timing, name: str, color: str, *, height: float) -> None:
    iterations, values = timing.columns.iterations, timing.tokens_per_second.tolist()
    axes.plot(iterations, values, color=color, linewidth=0.8, alpha=0.4)
    marker = "o" if len(values) == 1 else None
    axes.plot(iterations, running_median(values), color=color, linewidth=2.2, label=name, marker=marker)
    saved = timing.saves.iterations
    axes.plot(saved, [height] * len(saved), "x", color=color, transform=axes.get_xaxis_transform())


def _draw_spread(axes: Any, run: Row, color: str) -> None:
    low, middle, high = (run["tokens_per_second"][key] for key in ("p10", "median", "p90"))
    axes.barh(run["run"], high - low, left=low, height=0.5, color=color, alpha=0.45)
    axes.plot([middle], [run["run"]], "|", color=color, markersize=16, markeredgewidth=3)
    text = f"{middle:.0f}, saves {run['checkpoint_share']:.1%} of the time"
    axes.annotate(text, (high, run["run"]), xytext=(8, 0), textcoords="offset points", va="center", fontsize=9)
