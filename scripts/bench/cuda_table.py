"""The table of the battery on a device: every figure as a ratio within its group, beside its goal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.bench.cuda_group import EAGER, LEFT_OUT
from scripts.bench.cuda_saves import COPY, LOAD, LOAD_FILE, OURS, PROCESS, THREAD
from scripts.bench.cuda_steps import NANOGPT, TRANSFORMERS
from scripts.bench.cuda_variants import VARIANTS
from scripts.bench.tables import table


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound of a ratio, the least or the most."""

    name: str
    bound: float
    is_least: bool = False

    @property
    def target(self) -> str:
        """Return the bound as text."""
        return f"{'>=' if self.is_least else '<='} {self.bound}"


STEP = Goal("speed of the step over nanoGPT's way", 1.0, is_least=True)
STALL = Goal("stall of a save over one pinned copy", 1.1)
COST = Goal("cost of a save to training over DCP's best", 0.5)
FILL = Goal("load over safetensors' load_file", 1.2)
_SAVED = "save gpt2_1558m"
GOALS = (("step gpt2_124m", STEP), ("step gpt2_1558m", STEP), (_SAVED, STALL), (_SAVED, COST), (_SAVED, FILL))

HEAD = ("group", "side", "figures", "ratio", "goal")
Row = Mapping[str, Any]


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return the machine, the table and its notes as lines of Markdown."""
    head = [f"- {line}" for line in document["machine"]]
    notes = [
        f"Size {document['size']}, {document['seconds']:.0f} s in all. Ratios within one run. "
        "Steps and copies: medians. Saves: the second of two. Loads: the least of three.",
        "Step: the speed of reprise over that of the side. Stall: the call of a save and the first iteration after it, "
        "less a quiet iteration. Cost: the same of all iterations that follow, 10 in full size. Load: reprise checks "
        "every digest.",
        *(f"Not compiled: {reason}" for reason in sorted({row[EAGER] for row in document["rows"] if EAGER in row})),
        *(f"Goal: {line}" for line in goals(document["rows"])),
    ]
    return [*head, "", *table(HEAD, [*_rows(document["rows"])]), "", *(f"- {note}" for note in notes)]


def _rows(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        if LEFT_OUT in row:
            yield row["group"], row["side"], f"left out: {row[LEFT_OUT]}", "", ""
            continue
        beside = {
            sibling["side"]: sibling for sibling in rows if sibling["group"] == row["group"] and LEFT_OUT not in sibling
        }
        figures = _step(row) if "tokens_per_s" in row else _load(row) if "load_s" in row else _save(row)
        ratios = _ratios(row, beside)
        goal = "; ".join(filter(None, (ratio.verdict for ratio in ratios)))
        yield row["group"], row["side"], figures, "; ".join(ratio.text for ratio in ratios), goal


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


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two rows of a group, and its goal, if it has one."""

    text: str
    value: float
    goal: Goal | None = None

    @property
    def verdict(self) -> str:
        """Return the goal and whether it is met; empty without a goal."""
        if self.goal is None:
            return ""
        met = self.value >= self.goal.bound if self.goal.is_least else self.value <= self.goal.bound
        return f"{self.goal.target}: {'met' if met else 'missed'}"


def _ratios(row: Row, beside: Mapping[str, Row]) -> list[Ratio]:
    """Return the ratios of a row to the other sides of its group."""
    side, ratios = row["side"], list[Ratio]()
    if side in (NANOGPT, TRANSFORMERS) and OURS in beside:
        speed = row["step_s"] / beside[OURS]["step_s"]
        is_goal = side == NANOGPT and EAGER not in row and EAGER not in beside[OURS]
        ratios.append(Ratio(f"reprise {speed:.3f} x as fast", speed, STEP if is_goal else None))
    if side in VARIANTS and OURS in beside:
        speed = beside[OURS]["step_s"] / row["step_s"]
        ratios.append(Ratio(f"{speed:.3f} x as fast as reprise", speed))
    if side == LOAD and LOAD_FILE in beside:
        load = row["load_s"] / beside[LOAD_FILE]["load_s"]
        ratios.append(Ratio(f"{load:.3f} of load_file", load, FILL))
    if side in (OURS, THREAD, PROCESS) and COPY in beside and "stall_s" in row:
        stall = row["stall_s"] / beside[COPY]["stall_s"]
        ratios.append(Ratio(f"stall {stall:.3f} of the copy", stall, STALL if side == OURS else None))
    if side == OURS and "cost_s" in row:
        costs = [beside[name]["cost_s"] for name in (THREAD, PROCESS) if name in beside]
        if costs and min(costs) > 0:
            cost, has_both = row["cost_s"] / min(costs), len(costs) == 2
            best = "DCP's best" if has_both else "DCP's one side"
            ratios.append(Ratio(f"cost {cost:.3f} of {best}", cost, COST if has_both else None))
    return ratios


def goals(rows: Sequence[Row]) -> list[str]:
    """Return a line for each goal: the ratio and whether it is met, or that it is not measured."""
    measured = [row for row in rows if LEFT_OUT not in row]
    lines_of_goals = []
    for group, goal in GOALS:
        beside = {row["side"]: row for row in measured if row["group"] == group}
        ratios = [ratio for row in beside.values() for ratio in _ratios(row, beside) if ratio.goal is goal]
        outcome = f"{ratios[0].value:.3f}, {ratios[0].verdict}" if ratios else f"not measured, {goal.target}"
        lines_of_goals.append(f"{group}, {goal.name}: {outcome}")
    return lines_of_goals
