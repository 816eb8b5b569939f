"""Chooses what a report shows of runs: the charts of all runs, then the life of each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy

from trainer.report.charts import COLOURS, Chart, CurveLine, Values, curve_document
from trainer.report.history import History, LogColumns
from trainer.report.page import PageSection

ROWS = 40  # of the table of a curve, beside the values that are not finite

Runs = Sequence[tuple[str, History]]


def curve_sections(runs: Runs) -> list[PageSection]:
    """Return the charts of the runs' logs."""
    return [_chart_section(_loss_chart(runs))]


def x_of(history: History, columns: LogColumns) -> dict[str, Values]:
    """Return the places of iterations on each x axis; NaN where the log lacks them."""
    start = history.launches[0].began if history.launches else math.nan
    return {
        "iteration": columns.iteration,
        "tokens": columns.samples * history.tokens_per_sample,
        "hours": (columns.time - start) / 3600,
    }


def _loss_chart(runs: Runs) -> Chart:
    lines = [
        CurveLine(name, x_of(history, history.log.columns), history.log.columns.loss, COLOURS[number % len(COLOURS)])
        for number, (name, history) in enumerate(runs)
    ]
    return Chart("loss", "Loss", "loss", lines, curve_table(lines, "loss"))


def curve_table(lines: Sequence[CurveLine], unit: str) -> list[list[str]]:
    """Return some iterations of curves as rows, the last and those without a finite value among them."""
    values = [dict(zip(line.x["iteration"].tolist(), line.y.tolist(), strict=True)) for line in lines]
    iterations = numpy.unique(numpy.concatenate([line.x["iteration"] for line in lines]))
    even = numpy.linspace(0, len(iterations) - 1, min(ROWS, len(iterations))).round().astype(int)
    odd = [line.x["iteration"][~numpy.isfinite(line.y)][:ROWS] for line in lines]
    chosen = numpy.unique(numpy.concatenate([iterations[even], *odd])).tolist()
    rows = [[str(int(n)), *(_text(column.get(n)) for column in values)] for n in chosen]
    return [["iteration", *(f"{unit} of {line.name}" for line in lines)], *rows]


def _text(value: float | None) -> str:
    return "" if value is None else repr(value)


def _chart_section(chart: Chart) -> PageSection:
    return PageSection(chart.title, chart.notes, curve_document(chart), chart.table)
