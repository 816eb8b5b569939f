"""Prints rows of named values as a table, or as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from reprise.json_file import dumps
from trainer.compare.text_table import format_table

WIDEST = 60  # of a list in a table
Row = dict[str, Any]


def print_rows(rows: Sequence[Row], *, as_json: bool) -> None:
    """Print rows of equal columns as JSON or as a table."""
    if as_json:
        print(dumps(rows))
        return
    if not rows:
        return
    cells = [list(rows[0]), *([_cell(name, value) for name, value in row.items()] for row in rows)]
    print("\n".join(format_table(cells, align="<")))


def _cell(name: str, value: object) -> str:
    if name == "bytes" and isinstance(value, int):
        return f"{value / 1e6:,.3f} MB" if value >= 1000 else f"{value} B"
    if name == "age" and isinstance(value, float):
        return _age(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list) and len(str(value)) > WIDEST:
        return f"{len(value)} entries, --json shows them"
    return "" if value is None else str(value)


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def without_columns(rows: Iterable[Row], *names: str) -> list[Row]:
    """Return rows without some of their columns."""
    return [{name: value for name, value in row.items() if name not in names} for row in rows]


def flat(table: Row, path: str = "") -> list[tuple[str, Any]]:
    """Return the members of a nested object by dotted name."""
    members: list[tuple[str, Any]] = []
    for key, value in table.items():
        members += flat(value, f"{path}{key}.") if isinstance(value, dict) and value else [(f"{path}{key}", value)]
    return members
