"""Formats figures as Markdown tables, which also suit a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scripts.bench.rounds import ROUND, Figure, Rounds
from scripts.bench.ways import RAW

_MISSING = "-"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table whose columns have a common width."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return [line(head), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)]


def ways_table(results: Rounds, names: Sequence[str], *, total_bytes: int) -> list[str]:
    """Return the table of all ways: medians, each with the median of its ratio to the raw write or read."""
    head = ["", "durable, s", "blocked, s", "cost to training, s", "load, s", "cold load, s", "peak memory, GB", "disk"]
    rows = []
    for name in names:
        if name in results.reasons:
            rows.append([name, f"cannot run: {results.reasons[name]}", *[""] * (len(head) - 2)])
            continue
        cells = [_seconds(results, name, figure, Figure.DURABLE) for figure in _SAVING]
        cells += [_seconds(results, name, figure, figure) for figure in (Figure.LOAD, Figure.COLD_LOAD)]
        cells.append(_bytes(results.median(name, Figure.PEAK_BYTES), total_bytes, lambda b: f"{b / 1e9:.2f}"))
        cells.append(_bytes(results.median(name, Figure.DISK_BYTES), total_bytes, None))
        rows.append([name, *cells])
    return table(head, rows)


_SAVING = (Figure.DURABLE, Figure.BLOCKED, Figure.COST)

NOTES = (
    "Medians over rounds. All ways take turns, in another order each round. In brackets: the median of the ratio to "
    "the raw write (saving) or raw read (loading) of the same round; for memory and disk, the ratio to the bytes of "
    "the state.",
    "Durable: until files and folder are synced. Blocked: time of the main thread. Cost to training: blocked time plus "
    "the slowdown of a loop of matrix products on all cores during the save.",
    "Load: until the state is filled, from the page cache. The raw read goes into fresh memory and fills no state. "
    "Ours checks every digest. Cold: after the files were dropped from the page cache.",
    "The optimizer step comes after the background save has ended, or at once. Where staging memory stays from save to "
    "save, the third is measured: the first two, which allocate and populate it, count for memory but not for seconds.",
)


def round_lines(results: Rounds) -> list[str]:
    """Return lines of text for the figures of whole rounds."""
    lines = []
    if (copy_s := results.median(ROUND, Figure.COPY)) is not None:
        lines.append(f"one copy of the state from memory to memory: {copy_s:.3f} s")
    if (read_s := results.median(ROUND, Figure.WARM_READ)) is not None:
        lines.append(f"raw read into used memory: {read_s:.3f} s")
    if (noise_s := results.median(ROUND, Figure.NOISE)) is not None:
        lines.append(f"noise of half a second of the loop with nothing beside it: {noise_s:.3f} s")
    return lines


def _seconds(results: Rounds, name: str, figure: Figure, base: Figure) -> str:
    value, ratio = results.median(name, figure), results.ratio(name, figure, RAW, base)
    if value is None:
        return _MISSING
    return f"{value:.3f}" + ("" if ratio is None else f" ({ratio:.2f})")


def _bytes(value: float | None, total_bytes: int, show: Callable[[float], str] | None) -> str:
    if value is None:
        return _MISSING
    ratio = value / total_bytes
    return f"{ratio:.5f}" if show is None else f"{show(value)} ({ratio:.2f})"
