"""Formats rows of cells as a text table, and durations."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(rows: Sequence[Sequence[str]], *, align: str = "<>") -> list[str]:
    """Format rows of equal length as lines with padded columns.

    Args:
        align: `<` (left) or `>` (right) per column. The last character also covers all further columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligns = align + align[-1] * (len(widths) - len(align))
    return [
        "  ".join(f"{cell:{a}{width}}" for cell, a, width in zip(row, aligns, widths, strict=False)).rstrip()
        for row in rows
    ]


def duration(seconds: float) -> str:
    """Format a duration in its largest unit, such as `3.2 h`."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
