"""The table of the battery on a device: every figure as a ratio within its group, beside its goal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scripts.bench.cuda_group import LEFT_OUT
from scripts.bench.cuda_saves import COPY, LOAD, LOAD_FILE, OURS, PROCESS, THREAD
from scripts.bench.cuda_steps import NANOGPT, TRANSFORMERS
from scripts.bench.tables import table

HEAD = ("group", "side", "figures", "ratio", "goal")
Row = Mapping[str, Any]


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return the machine, the table and its notes as lines of Markdown."""
    head = [f"- {line}" for line in found["machine"]]
    notes = [
        f"Size {found['size']}, {found['seconds']:.0f} s in all. Medians; ratios within one run.",
        "Step: the speed of reprise over that of the side. Stall: the call of a save and the first iteration after it, "
        "less a quiet iteration. Cost: the same of all iterations that follow, 10 in full size. Load: reprise checks "
        "every digest.",
    ]
    return [*head, "", *table(HEAD, [*_rows(found["rows"])]), "", *(f"- {note}" for note in notes)]


def _rows(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        if LEFT_OUT in row:
            yield row["group"], row["side"], f"left out: {row[LEFT_OUT]}", "", ""
            continue
        beside = {other["side"]: other for other in rows if other["group"] == row["group"] and LEFT_OUT not in other}
        figures = _step(row) if "tokens_per_s" in row else _load(row) if "load_s" in row else _save(row)
        ratio, goal = _ratio(row, beside)
        yield row["group"], row["side"], figures, ratio, goal


def _step(row: Row) -> str:
    mfu = f", MFU {row['mfu']:.1%}" if "mfu" in row else ""
    spread = f"({row['least_s'] * 1e3:.1f} to {row['most_s'] * 1e3:.1f})"
    peak = f", peak {row['peak_bytes'] / 1e9:.1f} GB" if row["peak_bytes"] else ""
    return f"{row['step_s'] * 1e3:.1f} ms {spread}, {row['tokens_per_s']:,.0f} tok/s{mfu}{peak}"


def _load(row: Row) -> str:
    return f"{row['load_s']:.3f} s, {row['state_bytes'] / row['load_s'] / 1e9:.1f} GB/s"


def _save(row: Row) -> str:
    if "cost_s" not in row:
        return f"{row['stall_s']:.3f} s, {row['state_bytes'] / row['stall_s'] / 1e9:.1f} GB/s"
    peaks = ", ".join(
        f"{place} {row[f'{place}_peak_bytes'] / 1e9:.1f} GB"
        for place in ("host", "device")
        if row.get(f"{place}_peak_bytes")
    )
    return (
        f"stall {row['stall_s']:.3f} s (the first {row['first_stall_s']:.3f}), cost {row['cost_s']:.3f} s, "
        f"durable {row['durable_s']:.2f} s, step {row['step_s'] * 1e3:.1f} ms, peak: {peaks}"
    )


def _ratio(row: Row, beside: Mapping[str, Row]) -> tuple[str, str]:
    """Return the ratios of a row to the other sides of its group, and the goals of each."""
    side = row["side"]
    if side in (NANOGPT, TRANSFORMERS) and OURS in beside:
        ratio = row["step_s"] / beside[OURS]["step_s"]
        goal = ">= 1.0" if side == NANOGPT else ""
        return f"reprise {ratio:.3f} x as fast", goal
    if side == LOAD and LOAD_FILE in beside:
        return f"{row['load_s'] / beside[LOAD_FILE]['load_s']:.3f} of load_file", "<= 1.2"
    if side == OURS and "cost_s" in row:
        parts, goals = [], []
        if COPY in beside:
            parts.append(f"stall {row['stall_s'] / beside[COPY]['stall_s']:.3f} of the copy")
            goals.append("<= 1.1")
        costs = [beside[name]["cost_s"] for name in (THREAD, PROCESS) if name in beside]
        if costs and min(costs) > 0:
            parts.append(f"cost {row['cost_s'] / min(costs):.3f} of DCP's best")
            goals.append("<= 0.5")
        return "; ".join(parts), "; ".join(goals)
    if side in (THREAD, PROCESS) and COPY in beside:
        return f"stall {row['stall_s'] / beside[COPY]['stall_s']:.3f} of the copy", ""
    return "", ""
