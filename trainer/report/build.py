"""Builds a report's sections: charts across all runs, and each run's life."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy

from trainer.compare.curves import compare, tolerance_of
from trainer.compare.evaluations import read_evaluations
from trainer.compare.read import CONFIG_FILE, curve_of, read_dtype
from trainer.compare.text_table import duration
from trainer.config.saved import flattened
from trainer.metrics.log_file import Floats, Integers
from trainer.report.charts import COLORS, CurveLine, curve_document, life_document
from trainer.report.goodput import Goodput, measure_goodput
from trainer.report.history import SPEED, TIME, History
from trainer.report.life import life_of, life_rows, progress_lines
from trainer.report.page import PageSection

EVENTS = 1_000  # the newest events, in the table for a run's life
POINTS = 1_000  # points per line in the life chart
_MISSING = "-"
_DESCRIBED = ("host", "topology", "config", "environment", "versions", "commit")  # what a launch's record describes

Runs = Sequence[tuple[str, History]]


def report_sections(runs: Runs) -> list[PageSection]:
    """Return the page's sections for these runs.

    Raises:
        TrainerError: A run's values cannot be compared.
    """
    goodputs = {name: measure_goodput(history) for name, history in runs}
    return [
        _summary(runs, goodputs),
        _losses(runs),
        *(_differences(runs) for _ in runs[1:2]),
        *_measurements(runs),
        _column(runs, "grad_norm", "Gradient norm", "gradient norm"),
        *(_life(number, name, history) for number, (name, history) in enumerate(runs)),
        _goodput({name: goodput for name, goodput in goodputs.items() if goodput is not None}),
        _column(runs, SPEED, "Speed", "tokens/s"),
        _launches(runs),
    ]


def _summary(runs: Runs, goodputs: dict[str, Goodput | None]) -> PageSection:
    rows = [["run", "iterations", "last loss", "best valid loss", "tokens", "launches", "wall time", "goodput"]]
    for name, history in runs:
        columns, goodput = history.log.columns, goodputs[name]
        losses = history.log.evaluations.values[0]
        losses = losses[numpy.isfinite(losses)]
        rows.append(
            [
                name,
                f"{columns.iterations[-1]:,}",
                f"{columns.values[0, -1]:.6g}",
                f"{losses.min():.6g}" if losses.size else _MISSING,
                f"{history.tokens[-1] / 1e6:,.1f} M",
                str(len(history.launches)),
                duration(goodput.wall) if goodput else _MISSING,
                f"{goodput.share:.1%}" if goodput else _MISSING,
            ]
        )
    return PageSection("Runs", table=rows)


def _line(name: str, history: History, iterations: Integers, values: Floats, number: int, *, dots: bool) -> CurveLine:
    """Return a line through values at some iterations, placed on each axis."""
    columns = history.log.columns
    places = numpy.clip(columns.iterations.searchsorted(iterations), 0, len(columns) - 1)
    times = columns.column(TIME)
    began = history.launches[0].began if history.launches else times[0]
    x = {
        "iteration": iterations.astype(float),
        "tokens": history.tokens[places],
        "hours": (times[places] - began) / 3600,
    }
    return CurveLine(name, x, values, COLORS[number % len(COLORS)], is_dotted=dots)


def _lines(runs: Runs, column: str) -> list[CurveLine]:
    return [
        _line(name, history, history.log.columns.iterations, history.log.columns.column(column), number, dots=False)
        for number, (name, history) in enumerate(runs)
    ]


def _losses(runs: Runs) -> PageSection:
    lines = _lines(runs, "loss")
    for number, (name, history) in enumerate(runs, start=len(runs)):
        losses = history.log.evaluations
        if len(losses):
            title = f"{name}, validation"
            lines.append(_line(title, history, losses.iterations, losses.values[0], number, dots=True))
    note = "Long curves keep each section's smallest and largest value, and mark nonfinite values."
    return PageSection("Loss", [note], curve_document("loss", "loss", lines))


def _column(runs: Runs, column: str, title: str, unit: str) -> PageSection:
    return PageSection(title, chart=curve_document(column, unit, _lines(runs, column)))


def _differences(runs: Runs) -> PageSection:
    """Draw the loss differences from the first run, with the `compare-loss` verdicts."""
    curves = [replace(curve_of(history.log), dtype=read_dtype(history.folder / CONFIG_FILE)) for _, history in runs]
    lines, notes = list[CurveLine](), list[str]()
    for number, ((name, history), test) in enumerate(zip(runs[1:], curves[1:], strict=True), start=1):
        result = compare(curves[0], test, tolerance=tolerance_of(curves[0], test))
        points = result.points
        if len(points.base):
            lines.append(_line(name, history, points.base.iterations, points.sizes, number, dots=False))
        notes.append(f"{name}: {result.verdict}")
    is_log = any((line.y > 0).any() for line in lines)  # a logarithmic axis has no place for equal curves
    document = curve_document("difference", "absolute loss difference", lines, is_log=is_log)
    return PageSection(f"Differences from {runs[0][0]}", notes, document)


def _measurements(runs: Runs) -> Iterator[PageSection]:
    lines = list[CurveLine]()
    for number, (run, history) in enumerate(runs):
        for name, series in read_evaluations(history.folder).items():
            iterations = numpy.array(sorted(series))
            values = numpy.array([series[iteration] for iteration in sorted(series)])
            lines.append(_line(f"{run}: {name}", history, iterations, values, number, dots=True))
    if lines:
        yield PageSection("Measured by followers", chart=curve_document("measured", "value", lines))


def _life(number: int, name: str, history: History) -> PageSection:
    events = life_of(history)
    spans = [
        (launch.began, launch.ended, f"launch {n} on {launch.topology}, {duration(launch.ended - launch.began)}")
        for n, launch in enumerate(history.launches, start=1)
    ]
    document = life_document(f"life-{number}", spans, progress_lines(history, most=POINTS), events)
    kills = sum(event.kind == "kill" for event in events)
    notes = [
        f"Launches: {len(history.launches)}, killed: {kills}. Dashed lines show iterations abandoned by a later launch."
    ]
    return PageSection(f"Life of {name}", notes, document, life_rows(events, most=EVENTS))


def _goodput(goodputs: dict[str, Goodput]) -> PageSection:
    rows = [["part", *(f"{name}, {unit}" for name in goodputs for unit in ("s", "%"))]]
    for part in next(iter(goodputs.values())).parts if goodputs else ():
        pairs = [(goodput.parts[part], goodput.wall or 1.0) for goodput in goodputs.values()]
        rows.append([part, *(cell for s, wall in pairs for cell in (f"{s:.1f}", f"{100 * s / wall:.2f}"))])
    return PageSection("Goodput", ["The share of wall time spent training forward."], table=rows)


def _launches(runs: Runs) -> PageSection:
    """List each launch's machine and versions, and the settings that differ between launches."""
    records = {
        f"{name}, launch {number}": flattened({key: launch.record[key] for key in _DESCRIBED if key in launch.record})
        for name, history in runs
        for number, launch in enumerate(history.launches, start=1)
    }
    rows = [["", *records]]
    for key in dict.fromkeys(key for record in records.values() for key in record):
        values = [str(record.get(key, _MISSING)) for record in records.values()]
        if len(set(values)) > 1 or not key.startswith("config."):
            rows.append([key.removeprefix("config."), *values])
    return PageSection("Launches: machines, versions, and settings that differ", table=rows)
