"""The one harness: sides that take turns in rounds, a table of their medians, and bounds of ratios within a round.

A subject of the benchmark is a set of sides. A side is a function that measures once and returns figures by name. A
figure is compared with that of another side of the same round only, so a slow or busy machine cancels out.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from reprise.errors import TrainerError

Figures = dict[str, float]
Side = Callable[[], Figures]
Row = dict[str, Any]  # `side`, `round`, and `figures` or the reason under `left out`
LEFT_OUT = "left out"
# By which a side is left out. CheckpointException of DCP is no Exception.
_REASONS = (RuntimeError, OSError, MemoryError, ImportError, CheckpointException, TrainerError)


@dataclass(frozen=True, slots=True)
class Goal:
    """The median over rounds of a side's figure over another side's, and its bound; without a bound it is only shown.

    Args:
        base: the other side.
        bound: the largest ratio that meets the goal.
    """

    name: str
    side: str
    figure: str
    base: str
    bound: float | None = None

    def value(self, rows: Sequence[Row]) -> float | None:
        """Return the ratio, or None if a side is not measured."""
        values, base = (_by_round(rows, side, self.figure) for side in (self.side, self.base))
        ratios = [values[number] / base[number] for number in values if base.get(number)]
        return statistics.median(ratios) if ratios else None

    def cells(self, rows: Sequence[Row]) -> list[str]:
        """Return the name, the ratio, its bound and the verdict."""
        value = self.value(rows)
        bound = "" if self.bound is None else f"<= {self.bound:g}"
        if value is None:
            return [self.name, "not measured", bound, ""]
        verdict = "" if self.bound is None else "met" if value <= self.bound else "MISSED"
        return [self.name, f"{value:.3f}", bound, verdict]


def take_turns(
    sides: Mapping[str, Side],
    rounds: int,
    *,
    warm_up: int = 0,
) -> list[Row]:
    """Measure every side in each round, each round in another order, and return a row for each.

    All ranks make the same calls; a figure is that of the rank with the largest. A side that fails with an error that
    does not end the benchmark is left out from then on.

    Args:
        warm_up: rounds before the first that counts.
    """
    rows, names = list[Row](), list(sides)
    for number in range(-warm_up, rounds):
        first = max(0, number) % len(names)
        for name in [*names[first:], *names[:first]]:
            if any(row["side"] == name and LEFT_OUT in row for row in rows):
                continue
            row: Row = {"side": name, "round": number}
            try:
                row["figures"] = _largest(sides[name]())
            except _REASONS as error:  # the other sides are measured all the same
                traceback.print_exc()
                row[LEFT_OUT] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if number >= 0 or LEFT_OUT in row:
                rows.append(row)
    return rows


def _largest(figures: Figures) -> Figures:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return figures
    values = torch.tensor([*figures.values()], dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(figures, values.tolist(), strict=True))


def barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds of a call, which all ranks begin together."""
    barrier()
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
    ratio = Goal("", side, name, base).value(rows) if side != base else None
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


@contextmanager
def apart(
    build: Callable[..., Callable[..., Any]], *arguments: object, timeout_s: float | None = None
) -> Iterator[Callable[..., Any]]:
    """Yield a function that is built and called in a process of its own, with memory and allocator of its own.

    The process has a session of its own, and whatever it started ends with it.

    Args:
        timeout_s: the most seconds of a call, that of the building included.

    Raises:
        RuntimeError: if that process ends; from the call.
        TimeoutError: if it takes too long; from the call.
    """
    context = multiprocessing.get_context("spawn")
    pipe, other_end = context.Pipe()
    process = context.Process(target=_serve, args=(other_end, build, arguments))
    process.start()
    assert process.pid is not None
    other_end.close()  # so that a process that has died is noticed

    def call(*words: object) -> Any:
        try:
            pipe.send(words)
            if not pipe.poll(timeout_s):
                raise TimeoutError(f"took more than {timeout_s} s")
            return pipe.recv()
        except (EOFError, ConnectionError):
            process.join()
            raise RuntimeError(f"its process ended with status {process.exitcode}") from None

    try:
        yield call
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def _serve(pipe: Connection, build: Callable[..., Callable[..., Any]], arguments: Sequence[object]) -> None:
    os.setsid()
    call = build(*arguments)
    with suppress(EOFError):
        while True:
            pipe.send(call(*pipe.recv()))
