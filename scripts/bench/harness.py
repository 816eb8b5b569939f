"""The one harness: sides that take turns in rounds, a table of their medians, and bounds of ratios within a round.

A subject of the benchmark is a set of sides. A side is a function that measures once and returns figures by name. A
figure is compared with that of another side of the same round only, so a slow or busy machine cancels out.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from reprise.errors import TrainerError

Figures = dict[str, float]
Row = dict[str, Any]  # `group`, `side`, `round`, and `figures` or the reason under `left out`
LEFT_OUT = "left out"
# By which a side is left out. RuntimeError is that of torch's devices and compilers too; CheckpointException of DCP is
# no Exception; Triton calls a C compiler as a process.
_REASONS = (
    RuntimeError,
    OSError,
    MemoryError,
    AssertionError,
    TypeError,
    AttributeError,
    ValueError,
    LookupError,
    ImportError,
    EOFError,
    SubprocessError,
    CheckpointException,
    SafetensorError,
    TrainerError,
)


class WrongBytesError(Exception):
    """A side has loaded other bytes than it saved: no figure counts."""


@dataclass(frozen=True, slots=True)
class BenchSide:
    """A row of a table.

    Args:
        measure: measures once and returns figures by name.
        least_s: the least seconds with which it is begun.
    """

    measure: Callable[[], Figures]
    least_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Goal:
    """The median over rounds of a side's figure over another side's, and its bound; without a bound it is only shown.

    Args:
        base: the compared sides, all of them measured; the least figure among them counts.
        base_figure: the compared figure, if another.
    """

    name: str
    side: str
    figure: str
    base: Sequence[str]
    bound: float | None = None
    base_figure: str = ""
    is_least: bool = False

    def value(self, rows: Sequence[Row]) -> float | None:
        """Return the ratio, or None if a side is not measured."""
        figures = [_by_round(rows, side, self.base_figure or self.figure) for side in self.base]
        values = _by_round(rows, self.side, self.figure)
        ratios = [
            values[at] / min(base[at] for base in figures) for at in values if all(base.get(at) for base in figures)
        ]
        return statistics.median(ratios) if ratios else None

    def cells(self, rows: Sequence[Row]) -> list[str]:
        """Return the name, the ratio, its bound and the verdict."""
        value = self.value(rows)
        bound = "" if self.bound is None else f"{'>=' if self.is_least else '<='} {self.bound:g}"
        if value is None:
            return [self.name, "not measured", bound, ""]
        is_met = self.bound is None or (value >= self.bound if self.is_least else value <= self.bound)
        return [self.name, f"{value:.3f}", bound, "" if self.bound is None else "met" if is_met else "MISSED"]


def take_turns(
    sides: Mapping[str, BenchSide],
    rounds: int,
    *,
    tell: Callable[[Row], None] = lambda row: None,
    seconds: float = math.inf,
    warm_up: int = 0,
) -> list[Row]:
    """Measure every side in each round, each round in another order, and return a row for each.

    All ranks make the same calls; a figure is that of the rank with the largest. A side for which there is no time, or
    that fails with an error that does not end the benchmark, is left out from then on.

    Args:
        tell: is called with each row at once.
        warm_up: rounds before the first that counts.
    """
    rows, names, end = list[Row](), list(sides), time.monotonic() + seconds
    for number in range(-warm_up, rounds):
        first = max(0, number) % len(names)
        for name in [*names[first:], *names[:first]]:
            if any(row["side"] == name and LEFT_OUT in row for row in rows):
                continue
            row: Row = {"side": name, "round": number}
            left_s = end - time.monotonic()
            if left_s < sides[name].least_s:
                row[LEFT_OUT] = f"begins with {sides[name].least_s:.0f} s, {max(0.0, left_s):.0f} s were left"
            else:
                try:
                    row["figures"] = _largest(sides[name].measure())
                except _REASONS as error:  # the other sides are measured all the same
                    traceback.print_exc()
                    row[LEFT_OUT] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if number >= 0 or LEFT_OUT in row:
                rows.append(row)
                tell(row)
    return rows


def _largest(figures: Figures) -> Figures:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return figures
    values = torch.tensor([*figures.values()], dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(figures, values.tolist(), strict=True))


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds of a call, which all ranks begin together."""
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def report(rows: Sequence[Row], base: str = "", goals: Sequence[Goal] = ()) -> list[str]:
    """Return a table of medians, with the median ratio to the base side of the round in brackets, and the goals."""
    sides = list(dict.fromkeys(row["side"] for row in rows))
    names = list(dict.fromkeys(name for row in rows for name in row.get("figures", {})))
    lines = table(["", *names], [[side, *(_cell(rows, side, name, base) for name in names)] for side in sides])
    reasons = [f"- {row['side']} is left out: {row[LEFT_OUT]}" for row in rows if LEFT_OUT in row]
    lines += ["", *reasons] if reasons else []
    if goals:
        lines += ["", *table(["ratio", "measured", "bound", ""], [goal.cells(rows) for goal in goals])]
    return lines


def _cell(rows: Sequence[Row], side: str, name: str, base: str) -> str:
    values = _by_round(rows, side, name)
    if not values:
        return ""
    ratio = Goal("", side, name, [base]).value(rows) if side != base else None
    return f"{statistics.median(values.values()):,.4g}" + ("" if ratio is None else f" ({ratio:.3f})")


def _by_round(rows: Sequence[Row], side: str, name: str) -> dict[int, float]:
    """Return the figures of a side by round."""
    measured = [row for row in rows if row["side"] == side and name in row.get("figures", {})]
    return {row["round"]: row["figures"][name] for row in measured}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, which suits a terminal too."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return [line(head), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)]


def append(path: Path, row: Row) -> None:
    """Add a row to a file of JSON lines."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[Row]:
    """Return the rows of a file, of which the last may be cut off."""
    rows = []
    with suppress(FileNotFoundError, json.JSONDecodeError):
        for line in path.read_text(encoding="utf-8").splitlines():
            rows.append(json.loads(line))
    return rows


@contextmanager
def apart(build: Callable[..., Callable[[], Figures]], *arguments: object) -> Iterator[BenchSide]:
    """Yield a side that is built and measured in a process of its own, with memory and allocator of its own.

    Raises:
        SystemExit: if that process ends.
    """
    context = multiprocessing.get_context("spawn")
    pipe, other_end = context.Pipe()
    process = context.Process(target=_serve, args=(other_end, build, arguments), daemon=True)
    process.start()
    other_end.close()  # so that a process that has died is noticed

    def measure() -> Figures:
        try:
            pipe.send(True)
            figures: Figures = pipe.recv()
        except (EOFError, ConnectionError):
            process.join()
            raise SystemExit(f"the process of a side ended, status {process.exitcode}") from None
        return figures

    try:
        yield BenchSide(measure)
    finally:
        pipe.close()
        process.terminate()
        process.join()


def _serve(pipe: Connection, build: Callable[..., Callable[[], Figures]], arguments: Sequence[object]) -> None:
    measure = build(*arguments)
    with suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while pipe.recv():
            pipe.send(measure())
