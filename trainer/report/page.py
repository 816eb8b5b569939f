"""Assembles a report page: one file containing the library, the charts, their points and the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from reprise.storage import Json, dumps

_LONG = 40  # longer cells may wrap

Rows = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class PageSection:
    """A section on the page.

    Args:
        title: The section's heading.
        notes: Sentences below the heading.
        chart: The chart document for `page.js`. None for a section without a chart.
        table: Rows of cells, starting with the header. Below a chart, the table is collapsed.
    """

    title: str
    notes: Sequence[str] = ()
    chart: Json | None = None
    table: Rows = ()


def render(title: str, sections: Sequence[PageSection]) -> str:
    """Return the page as HTML."""
    from bokeh.resources import Resources

    scripts = Resources(mode="inline", components=["bokeh"], log_level="warn").js_raw
    charts = [section.chart for section in sections if section.chart is not None]
    folder = files("trainer.report")
    style, program = ((folder / name).read_text() for name in ("page.css", "page.js"))
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{style}</style></head>',
            f"<body><h1>{escape(title)}</h1>",
            *map(_section, sections),
            f'<script type="application/json" id="charts">{_script_safe(dumps(charts))}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            f"<script>{program}</script></body></html>",
        ]
    )


def _section(section: PageSection) -> str:
    parts = [f"<section><h2>{escape(section.title)}</h2>", *(f"<p>{escape(note)}</p>" for note in section.notes)]
    table = _table(section.table) if section.table else ""
    if section.chart is not None:
        key = escape(section.chart["key"])
        parts.append(f'<div class="controls" id="controls-{key}"></div>')
        parts.append(f'<div class="chart" id="chart-{key}" role="img" aria-label="{escape(section.title)}"></div>')
        table = table and f"<details><summary>Table</summary>{table}</details>"
    return "".join([*parts, table, "</section>"])


def _table(rows: Rows) -> str:
    head, *body = rows
    cells = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = ["".join(map(_cell, row)) for row in body]
    return (
        f'<div class="table"><table><thead><tr>{cells}</tr></thead><tbody>'
        f"{''.join(f'<tr>{line}</tr>' for line in lines)}</tbody></table></div>"
    )


def _cell(text: str) -> str:
    kind = ' class="text"' if len(text) > _LONG else ""
    return f"<td{kind}>{escape(text)}</td>"


def _script_safe(text: str) -> str:
    """Escape JSON so that it cannot end a script element."""
    return text.replace("<", "\\u003c")
