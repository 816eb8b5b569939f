"""Builds a report's sections: charts across all runs, then each run's life."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import numpy

from reprise.storage import Json
from trainer.compare.defaults import SKIPPED
from trainer.compare.evaluations import Series, read_evaluations, with_losses
from trainer.compare.speed import Spread
from trainer.compare.text_table import duration
from trainer.metrics.log_file import Integers
from trainer.record.resume_rules import flattened
from trainer.report.charts import (
    COLORS,
    MARKS,
    Chart,
    CurveLine,
    LifeMark,
    Values,
    bar_document,
    curve_document,
    library,
    life_document,
)
from trainer.report.differences import difference_of
from trainer.report.goodput import Goodput, measure_goodput
from trainer.report.history import SAMPLES, SPEED, TIME, History
from trainer.report.life import LifeEvent, life_of, life_rows, progress_lines, topology_text
from trainer.report.page import PageSection

ROWS = 40  # table rows per curve, beside nonfinite values
EVENTS = 1_000  # the newest events, in the table for a run's life
POINTS = 1_000  # points per line in the life chart
_MISSING = "-"

Runs = Sequence[tuple[str, History]]


def report_sections(runs: Runs) -> list[PageSection]:
    """Return the page's sections for these runs.

    Raises:
        TrainerError: A drawing package is missing.
    """
    library()
    goodputs = [(name, measure_goodput(history)) for name, history in runs]
    measurements = _measurement_chart(runs)
    return [
        _summary(runs, dict(goodputs)),
        _curve_section(_loss_chart(runs)),
        *(_curve_section(_difference_chart(runs)) for _ in runs[1:2]),
        *(_curve_section(chart) for chart in measurements),
        _curve_section(_column_chart(runs, "grad_norm", "Gradient norm", "gradient norm")),
        *(_life_section(number, name, history) for number, (name, history) in enumerate(runs)),
        *_goodput_section([(name, goodput) for name, goodput in goodputs if goodput is not None]),
        _curve_section(_speed_chart(runs)),
        *(section for name, history in runs for section in _changes(name, history)),
        _machine_section(runs),
    ]


def x_of(history: History) -> dict[str, Values]:
    """Return each iteration's position on every x axis. NaN marks positions missing from the log."""
    start, columns = history.launches[0].began if history.launches else math.nan, history.log.columns
    return {
        "iteration": columns.iterations.astype(float),
        "tokens": columns.column(SAMPLES) * history.tokens_per_sample,
        "hours": (columns.column(TIME) - start) / 3600,
    }


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
                f"{columns.column(SAMPLES)[-1] * history.tokens_per_sample:,.0f}",
                str(len(history.launches)),
                duration(goodput.wall) if goodput else _MISSING,
                f"{goodput.share:.1%}" if goodput else _MISSING,
            ]
        )
    return PageSection("Runs", table=rows)


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _loss_chart(runs: Runs) -> Chart:
    lines = _lines(runs, "loss")
    for number, (name, history) in enumerate(runs):
        for losses in with_losses(history.log.evaluations, {}).values():
            lines.append(_series_line(f"{name}, validation", history, losses, _color(len(runs) + number)))
    return Chart("loss", "Loss", "loss", lines, curve_table(lines, "loss"), _thinning_notes(runs), points=36_000)


def _series_line(name: str, history: History, series: Series, color: str) -> CurveLine:
    """Return a line through values at some iterations, placed on each axis."""
    iterations, values = map(numpy.array, zip(*sorted(series.items()), strict=True))
    x = _x_at(history, iterations) | {"iteration": iterations.astype(float)}
    return CurveLine(name, x, values, color, is_dotted=True)


def _x_at(history: History, iterations: Integers) -> dict[str, Values]:
    columns = history.log.columns
    places = numpy.clip(columns.iterations.searchsorted(iterations), 0, len(columns) - 1)
    return {axis: values[places] for axis, values in x_of(history).items()}


def _thinning_notes(runs: Runs) -> list[str]:
    most = max(len(history.log.columns) for _, history in runs)
    if most <= 2_000:
        return []
    return ["Thinned curves keep each section's smallest and largest value, and mark nonfinite values."]


def _lines(runs: Runs, column: str) -> list[CurveLine]:
    return [
        CurveLine(name, x_of(history), history.log.columns.column(column), _color(number))
        for number, (name, history) in enumerate(runs)
    ]


def _column_chart(runs: Runs, column: str, title: str, unit: str) -> Chart:
    lines = _lines(runs, column)
    return Chart(column, title, unit, lines, curve_table(lines, unit))


def _difference_chart(runs: Runs) -> Chart:
    (base_name, base), *tests = runs
    lines, notes = list[CurveLine](), list[str]()
    for number, (name, history) in enumerate(tests, start=1):
        iterations, sizes, verdict = difference_of(base, history)
        if sizes.size:
            lines.append(CurveLine(name, _x_at(history, iterations), sizes, _color(number)))
        notes.append(f"{name}: {verdict}")
    unit = "absolute loss difference"
    return Chart(
        "difference", f"Differences from {base_name}", unit, lines, curve_table(lines, unit), notes, is_log=True
    )


def _measurement_chart(runs: Runs) -> Iterator[Chart]:
    lines = [
        _series_line(f"{run}: {name}", history, series, _color(number))
        for number, (run, history) in enumerate(runs)
        for name, series in read_evaluations(history.folder).items()
    ]
    if lines:
        yield Chart("measured", "Measured by followers", "value", lines, curve_table(lines, "value"))


def _speed_chart(runs: Runs) -> Chart:
    rows = [["run", "launch", "iterations", "median tokens/s", "p10", "p25", "p75", "p90"]]
    for name, history in runs:
        columns, times = history.log.columns, history.log.columns.column(TIME)
        borders = [launch.began for launch in history.launches] + [math.inf]
        for number, (begin, end) in enumerate(pairwise(borders), start=1):
            speeds = columns.column(SPEED)[(times >= begin) & (times < end)][SKIPPED:]
            if speeds.size:
                spread = Spread.of(speeds)
                values = (spread.median, spread.p10, spread.p25, spread.p75, spread.p90)
                rows.append([name, str(number), f"{speeds.size:,}", *(f"{value:,.1f}" for value in values)])
    note = f"The table shows each launch's spread without its first {SKIPPED} iterations."
    return Chart("speed", "Speed", "tokens/s", _lines(runs, SPEED), rows, [note])


def _life_section(number: int, name: str, history: History) -> PageSection:
    events = life_of(history)
    spans = [
        (
            launch.began,
            launch.ended,
            f"launch {place} on {topology_text(launch)}, {duration(launch.ended - launch.began)}",
        )
        for place, launch in enumerate(history.launches, start=1)
    ]
    lines = progress_lines(history, most=POINTS)
    marks = [mark for event in events for mark in _marks(event)]
    document = life_document(f"life-{number}", spans, lines, marks)
    kills = sum(event.kind == "kill" for event in events)
    notes = [
        f"Launches: {len(history.launches)}, killed: {kills}. Dashed lines show iterations abandoned by a later launch."
    ]
    return PageSection(f"Life of {name}", notes, document, life_rows(events, most=EVENTS))


def _marks(event: LifeEvent) -> Iterator[LifeMark]:
    style = event.state or event.kind
    style = {"weights": "light save", "local": "local save", "unreadable": "damaged"}.get(style, style)
    style = "kept" if style.startswith("kept") else style
    if style in MARKS:
        yield LifeMark(event.time, event.iteration, style, event.text)


def _goodput_section(goodputs: Sequence[tuple[str, Goodput]]) -> list[PageSection]:
    if not goodputs:
        return []
    names, figures = [name for name, _ in goodputs], [goodput for _, goodput in goodputs]
    bars = {text: [_bar(figure.parts[text], figure.wall or 1.0) for figure in figures] for text in figures[0].parts}
    rows = [["part", *(f"{name}, {unit}" for name in names for unit in ("s", "%"))]]
    for text in [*bars, "wall time"]:
        pairs = [(figure.parts.get(text, figure.wall), figure.wall) for figure in figures]
        cells = [(f"{part:.1f}", f"{100 * part / wall:.2f}" if wall else _MISSING) for part, wall in pairs]
        rows.append([text, *chain.from_iterable(cells)])
    note = "The share of wall time spent training forward."
    return [PageSection("Goodput", [note], bar_document("goodput", names, bars), rows)]


def _bar(seconds: float, wall: float) -> tuple[float, str]:
    return 100 * seconds / wall, f"{duration(seconds)}, {seconds / wall:.2%}"


def _changes(name: str, history: History) -> Iterator[PageSection]:
    """Yield a table with the settings and versions that changed between launches, side by side."""
    records = [flattened(_launch_settings(launch.record)) for launch in history.launches if launch.record]
    numbers = [number for number, launch in enumerate(history.launches, start=1) if launch.record]
    keys = dict.fromkeys(key for record in records for key in record)
    rows = []
    for key in keys:
        values = [_cell(record.get(key)) for record in records]
        if len(set(values)) > 1:
            rows.append([key.removeprefix("config."), *values])
    if len(records) > 1:
        notes = [] if rows else ["No setting, version or machine changed between the launches."]
        table = [["setting", *(f"launch {number}" for number in numbers)], *rows] if rows else ()
        yield PageSection(f"What changed between launches of {name}", notes, table=table)


def _launch_settings(record: Json) -> Json:
    names = ("host", "topology", "config", "environment", "versions", "commit")
    return {name: record[name] for name in names if name in record}


def _machine_section(runs: Runs) -> PageSection:
    """Return a section with the machine and versions in each run's last launch."""
    columns = []
    for _, history in runs:
        record = history.launches[-1].record if history.launches else {}
        first = history.launches[-1].first if history.launches else None
        described = {name: value for name, value in _launch_settings(record).items() if name != "config"}
        columns.append(flattened(described or {"versions": (first or {}).get("versions", {})}))
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [[key, *(_cell(column.get(key)) for column in columns)] for key in keys]
    return PageSection("Machine and versions", table=[["", *(name for name, _ in runs)], *rows])


def _cell(value: object) -> str:
    return _MISSING if value is None else str(value)


def curve_table(lines: Sequence[CurveLine], unit: str) -> list[list[str]]:
    """Return table rows for evenly spaced iterations, including the last, and for nonfinite values."""
    if not lines:
        return []
    iterations = numpy.unique(numpy.concatenate([line.x["iteration"] for line in lines]))
    even = numpy.linspace(0, len(iterations) - 1, min(ROWS, len(iterations))).round().astype(int)
    gaps = [line.x["iteration"][~numpy.isfinite(line.y)][:ROWS] for line in lines]
    rows = [
        [str(int(iteration)), *(_value_at(line, iteration) for line in lines)]
        for iteration in numpy.unique(numpy.concatenate([iterations[even], *gaps])).tolist()
    ]
    return [["iteration", *(f"{unit} of {line.name}" for line in lines)], *rows]


def _value_at(line: CurveLine, iteration: float) -> str:
    place = int(numpy.searchsorted(line.x["iteration"], iteration))
    is_there = place < line.y.size and line.x["iteration"][place] == iteration
    return repr(float(line.y[place])) if is_there else ""


def _curve_section(chart: Chart) -> PageSection:
    return PageSection(chart.title, chart.notes, curve_document(chart), chart.table)
