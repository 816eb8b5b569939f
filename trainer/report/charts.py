"""Charts of a report: bokeh's figures, with curves that the page fills for the part that it shows."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
from numpy.typing import NDArray

from reprise.errors import TrainerError
from reprise.json_file import Json
from trainer.report.thin import levels, smoothed

# Of Okabe and Ito's colours, those that are told apart on white and on black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
WINDOWS = (10, 100, 1_000)  # iterations of a running mean
X_LABELS = {"iteration": "iteration", "tokens": "tokens", "hours": "hours since the first start"}
POINTS = 36_000  # of the finest levels of all curves of a chart, 50 bytes each in the page
HEIGHT = 320  # of a chart, in pixels

Values = NDArray[numpy.float64]


@dataclass(frozen=True, slots=True)
class CurveLine:
    """A curve of a chart.

    Args:
        x: by the names of `X_LABELS`, in ascending order.
        y: its values; those that are not finite are marked at the lower edge.
        is_dotted: whether it is drawn as points on a thin line, as few values are.
    """

    name: str
    x: dict[str, Values]
    y: Values
    colour: str
    is_dotted: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of curves, and a table of it.

    Args:
        key: its name in the page.
        notes: sentences below its title.
        table: rows of cells, the first is the head.
        is_log: whether its y axis is logarithmic until a reader changes it.
    """

    key: str
    title: str
    unit: str
    lines: Sequence[CurveLine]
    table: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    is_log: bool = False
    x_names: Sequence[str] = field(default_factory=lambda: tuple(X_LABELS))


def library() -> Any:
    """Return bokeh's module of figures.

    Raises:
        TrainerError: bokeh or tsdownsample is not installed.
    """
    try:
        import tsdownsample  # noqa: F401 - thins curves
        from bokeh import plotting
    except ImportError as error:
        raise TrainerError(
            "A report needs bokeh and tsdownsample", fix="Install them with: pip install 'torch-reprise[report]'"
        ) from error
    return plotting


def new_figure(title: str, **settings: Any) -> Any:
    """Return an empty figure as wide as the page, with tools that zoom along the x axis alone."""
    tools = "xpan,xwheel_zoom,xbox_zoom,reset"
    figure = library().figure(
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


def curve_document(chart: Chart) -> Json:
    """Return a chart for the page: bokeh's document, the points of its curves at every level, and its settings."""
    from bokeh.embed import json_item
    from bokeh.models import ColumnDataSource, HoverTool, LinearScale, LogScale, Range1d

    figure = new_figure(chart.key, x_range=Range1d(0, 1), y_range=Range1d(0, 1))
    figure.tags = [LinearScale(), LogScale(), *_axis_parts(is_log=False), *_axis_parts(is_log=True)]
    figure.yaxis.axis_label = chart.unit
    hovered = []
    for line in chart.lines:
        raw, mean, gaps = (ColumnDataSource({"x": [], "y": [], "iteration": [], "text": []}) for _ in range(3))
        figure.line("x", "y", source=raw, color=line.colour, line_width=1.2, name=line.name)
        figure.line("x", "y", source=mean, color=line.colour, line_width=2, name=line.name)
        marker = "circle" if line.is_dotted else "x"
        edge = figure.scatter("x", "y", source=gaps, marker=marker, color="#d00000", size=8, name=line.name)
        hovered += [figure.renderers[-3], edge]
        if line.is_dotted:
            figure.scatter("x", "y", source=raw, color=line.colour, size=6, name=line.name)
    html = f"<b>$name</b><br>iteration @iteration{{0}}<br>{chart.unit} @text"
    figure.add_tools(HoverTool(renderers=hovered, tooltips=html, mode="vline", line_policy="nearest"))
    budget = max(2_000, POINTS // max(1, len(chart.lines)))
    return {
        "key": chart.key,
        "item": json_item(figure, f"chart-{chart.key}"),
        "isLog": chart.is_log,
        "labels": {name: X_LABELS[name] for name in chart.x_names},
        "curves": [_packed_line(line, budget, chart.x_names) for line in chart.lines],
    }


def _axis_parts(*, is_log: bool) -> list[Any]:
    from bokeh.models import BasicTicker, BasicTickFormatter, LogTicker

    ticker = LogTicker(desired_num_ticks=6) if is_log else BasicTicker()
    return [ticker, BasicTickFormatter()]


def _packed_line(line: CurveLine, budget: int, x_names: Sequence[str]) -> Json:
    windows = WINDOWS if not line.is_dotted else ()
    means = smoothed(line.y, windows)
    parts = []
    for indices in levels(line.y, most=budget):
        x = {name: _packed(line.x[name][indices], "i4" if name == "iteration" else "f8") for name in x_names}
        smooth = {str(window): _packed(mean[indices], "f4") for window, mean in means.items()}
        iteration = x.get("iteration") or _packed(line.x["iteration"][indices], "i4")
        parts.append({"x": x, "iteration": iteration, "y": _packed(line.y[indices], "f8"), "smooth": smooth})
    return {"name": line.name, "colour": line.colour, "isDotted": line.is_dotted, "levels": parts}


def _packed(values: Values, kind: str) -> Json:
    data = numpy.ascontiguousarray(values, dtype=f"<{kind}").tobytes()
    return {"type": kind, "data": base64.b64encode(data).decode()}
