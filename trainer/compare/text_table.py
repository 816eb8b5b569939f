"""Prints rows of cells as a table of text."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(rows: Sequence[Sequence[str]], *, align: str = "<>") -> list[str]:
    """Return rows of equal length as lines of padded columns.

    Args:
        align: `<` (left) or `>` (right) for each column; the last also applies to all columns after it.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligns = align + align[-1] * (len(widths) - len(align))
    return [
        "  ".join(f"{cell:{a}{width}}" for cell, a, width in zip(row, aligns, widths, strict=False)).rstrip()
        for row in rows
    ]
