"""A report's charts: bokeh figures, whose curves the page fills."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from reprise.storage import Json
from trainer.metrics.log_file import Floats
from trainer.report.life import LifeEvent
from trainer.report.thin import smoothed, thinned

# The Okabe-Ito colors distinguishable on both white and black.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
WINDOWS = (10, 100, 1_000)  # iterations per running mean
X_KINDS = {"iteration": "i4", "tokens": "f8", "hours": "f4"}  # numpy type codes
X_LABELS = {"iteration": "iteration", "tokens": "tokens", "hours": "hours since the first start"}
POINTS = 12_000  # in a chart across its curves, 48 bytes each in the page
FEWEST_POINTS = 400  # per curve in a chart with many curves
DASH = 40  # length of a curve's dash pattern, in pixels
HEIGHT = 320  # of a chart, in pixels

# Marker, color, size and whether it is filled, for each kind of event.
MARKS = {
    "evaluation": ("circle", "#56b4e9", 5, True),
    "save kept": ("triangle", "#009e73", 10, True),
    "save": ("triangle", "#009e73", 10, False),
    "weights save": ("inverted_triangle", "#e69f00", 8, True),
    "local save": ("inverted_triangle", "#cc79a7", 8, True),
    "spike": ("star", "#d00000", 12, False),
    "kill": ("x", "#d00000", 12, True),
}


@dataclass(frozen=True, slots=True)
class CurveLine:
    """A curve in a chart.

    Args:
        x: Positions per `X_LABELS` axis, ascending.
        y: Values. Nonfinite values are marked at the lower edge.
        is_dotted: Whether to draw points on a thin line, as for sparse values.
    """

    name: str
    x: dict[str, Floats]
    y: Floats
    color: str
    is_dotted: bool = False


def new_figure(title: str, **settings: Any) -> Any:
    """Return an empty figure as wide as the page. Its tools zoom only along the x axis."""
    from bokeh.plotting import figure as make_figure

    tools = "xpan,xwheel_zoom,xbox_zoom,reset"
    figure = make_figure(
        sizing_mode="stretch_width",
        height=HEIGHT,
        min_width=240,
        tools=tools,
        active_drag="xbox_zoom",
        toolbar_location="above",
        output_backend="canvas",
        title=None,
        name=title,
        **settings,
    )
    figure.toolbar.logo = None
    figure.xaxis.axis_label_text_font_style = figure.yaxis.axis_label_text_font_style = "normal"
    return figure


def curve_document(key: str, unit: str, lines: Sequence[CurveLine], *, is_log: bool = False) -> Json:
    """Return a chart for the page: the bokeh document, the curves' points, and settings.

    Args:
        key: The chart's name in the page.
        is_log: Whether the y axis starts out logarithmic. Readers can switch it.
    """
    from bokeh.embed import json_item
    from bokeh.models import ColumnDataSource, HoverTool, LinearScale, LogScale, NumeralTickFormatter, Range1d

    figure = new_figure(key, x_range=Range1d(0, 1), y_range=Range1d(0, 1))
    figure.tags = [LinearScale(), LogScale(), *_axis_parts(is_log=False), *_axis_parts(is_log=True)]
    figure.yaxis.axis_label = unit
    figure.xaxis.formatter = NumeralTickFormatter(format="0.[000]a")
    hovered, count = [], len(lines)
    for number, line in enumerate(lines):
        raw, mean, gaps = (ColumnDataSource({"x": [], "y": [], "iteration": [], "text": []}) for _ in range(3))
        # Where curves are equal, gaps in each show the curves below.
        length = max(2, DASH * (count - number) // count)
        dash = [length, DASH - length] if number else []
        figure.line("x", "y", source=raw, color=line.color, line_width=1.6, line_dash=dash, name=line.name)
        figure.line("x", "y", source=mean, color=line.color, line_width=2, line_dash=dash, name=line.name)
        marker = "circle" if line.is_dotted else "x"
        edge = figure.scatter("x", "y", source=gaps, marker=marker, color="#d00000", size=8, name=line.name)
        hovered += [figure.renderers[-3], edge]
        if line.is_dotted:
            figure.scatter("x", "y", source=raw, color=line.color, size=6, name=line.name)
    html = f"<b>$name</b><br>iteration @iteration{{0}}<br>{unit} @text"
    figure.add_tools(HoverTool(renderers=hovered, tooltips=html, mode="vline", line_policy="nearest"))
    budget = max(FEWEST_POINTS, POINTS // max(1, count))
    return {
        "key": key,
        "item": json_item(figure, f"chart-{key}"),
        "isLog": is_log,
        "labels": X_LABELS,
        "curves": [_packed_line(line, budget) for line in lines],
    }


def _axis_parts(*, is_log: bool) -> list[Any]:
    from bokeh.models import BasicTicker, BasicTickFormatter, LogTicker

    ticker = LogTicker(desired_num_ticks=6) if is_log else BasicTicker()
    return [ticker, BasicTickFormatter(power_limit_high=7)]


def _packed_line(line: CurveLine, budget: int) -> Json:
    places = thinned(line.y, budget)
    windows = [window for window in WINDOWS if window < len(line.y) and not line.is_dotted]
    return {
        "name": line.name,
        "color": line.color,
        "isDotted": line.is_dotted,
        "x": {name: _packed(line.x[name][places], kind) for name, kind in X_KINDS.items()},
        "y": _packed(line.y[places], "f8"),
        "smooth": {str(window): _packed(smoothed(line.y, window)[places], "f4") for window in windows},
    }


def _packed(values: Floats, kind: str) -> Json:
    data = numpy.ascontiguousarray(values, dtype=f"<{kind}").tobytes()
    return {"type": kind, "data": base64.b64encode(data).decode()}


def life_document(
    key: str,
    spans: Sequence[tuple[float, float, str]],
    lines: Sequence[tuple[list[float], list[float], bool]],
    events: Sequence[LifeEvent],
) -> Json:
    """Return a run's life chart for the page: iterations over time.

    Args:
        spans: Start, end and hover text for each launch, in Unix time.
        lines: Times, iterations, and whether the iterations were abandoned.
        events: Events. Those in `MARKS` are drawn.
    """
    from bokeh.embed import json_item
    from bokeh.models import HoverTool, NumeralTickFormatter

    figure = new_figure(key, x_axis_type="datetime")
    figure.yaxis.axis_label, figure.xaxis.axis_label = "iteration", "time (UTC)"
    figure.xaxis.ticker.desired_num_ticks = 4
    figure.y_range.start = 0
    figure.yaxis.formatter = NumeralTickFormatter(format="0.[000]a")
    top = max([1.0, *(max(y) for _, y, _ in lines)])
    quads = {
        "left": [began * 1e3 for began, _, _ in spans],
        "right": [ended * 1e3 for _, ended, _ in spans],
        "text": [text for _, _, text in spans],
    }
    figure.quad(
        left="left", right="right", bottom=0, top=top * 1.06, source=quads, color="#0072b2", alpha=0.09, name="launch"
    )
    for times, iterations, is_given_up in lines:
        color, dash = ("#909090", "dashed") if is_given_up else ("#0072b2", "solid")
        figure.line([time * 1e3 for time in times], iterations, color=color, line_dash=dash, line_width=1.6)
    hovered, legend = list(figure.renderers[:1]), list[list[object]]()
    for kind, (marker, color, size, is_filled) in MARKS.items():
        if marks := [event for event in events if event.kind == kind]:
            columns = {
                "x": [mark.time * 1e3 for mark in marks],
                "y": [mark.iteration for mark in marks],
                "text": [mark.text for mark in marks],
            }
            fill = {"fill_color": color} if is_filled else {"fill_alpha": 0.0}
            glyph = figure.scatter(
                "x", "y", source=columns, marker=marker, line_color=color, size=size, name=kind, **fill
            )
            hovered.append(glyph)
            legend.append([kind, color, not is_filled])
    figure.add_tools(HoverTool(renderers=hovered, tooltips="<b>$name</b> @y{0}<br>@text"))
    return {"key": key, "item": json_item(figure, f"chart-{key}"), "legend": legend}
