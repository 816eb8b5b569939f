"""How fast runs were, and what saving cost them, from their `metrics.jsonl`; the figures of several runs as tables.

Drawing them is in `trainer/speed_plot.py`; measuring them is the business of the loop and the metrics module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from trainer.curves_read import METRICS_FILE, parse_records, read_run_file
from trainer.curves_table import format_table
from trainer.errors import DataError

# What is slow once: the first iterations fill caches, allocate memory and, where asked for, compile.
SKIPPED = 5


@dataclass(frozen=True, slots=True)
class TimedIteration:
    """What one iteration took; `seconds` leaves out what saving kept it."""

    iteration: int
    seconds: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class TimedSave:
    """What one committed save took until its commit, kept training waiting, and slowed its iterations down, in s."""

    iteration: int
    seconds: float
    blocked_s: float
    slowdown_s: float


@dataclass(frozen=True, slots=True)
class Timing:
    """All iterations and saves of one run, in order of iteration; never without an iteration from `read_timing`."""

    source: str
    iterations: tuple[TimedIteration, ...]
    saves: tuple[TimedSave, ...] = ()
    notes: tuple[str, ...] = ()

    def without_first(self, count: int) -> Timing:
        """Leave out the first iterations, and the saves of them.

        Raises:
            DataError: nothing is left.
        """
        left = self.iterations[count:]
        if not left:
            raise DataError(
                "A run is too short to measure",
                where=self.source,
                expected=f"more than the {count} iterations that are left out",
                found=len(self.iterations),
                fix="Leave out fewer with --skip.",
            )
        saves = tuple(save for save in self.saves if save.iteration >= left[0].iteration)
        return Timing(self.source, left, saves, self.notes)


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values, and the values below and above which a tenth of them lie."""

    median: float
    p10: float
    p90: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Return the spread of at least one value, interpolating between neighbours."""
        if len(values) == 1:
            return Spread(values[0], values[0], values[0])
        tenths = quantiles(values, n=10, method="inclusive")
        return Spread(median(values), tenths[0], tenths[-1])


@dataclass(frozen=True, slots=True)
class Speed:
    """The figures of one run.

    Attributes:
        tokens_per_second: of the iterations, without what saving kept them.
        seconds: of one iteration.
        saves: how many were committed.
        save_seconds: median from the call to the commit; None without saves.
        blocked_s: how long training stood still for saves in all, and for the save before them.
        slowdown_s: how much longer iterations took in all while saves were written, against the median of those before.
        checkpoint_share: both of these of the time of all iterations and stands; where iterations were not slower, 0.
        tokens_per_second_overall: all tokens of all that time.
    """

    tokens_per_second: Spread
    seconds: Spread
    iterations: int
    saves: int
    save_seconds: float | None
    blocked_s: float
    slowdown_s: float
    checkpoint_share: float
    tokens_per_second_overall: float


def read_timing(path: str | Path) -> Timing:
    """Read what a run folder, or its metrics.jsonl, tells of times.

    Raises:
        DataError: the file cannot be read, is a text log, or holds no time of an iteration.
    """
    file, text, is_metrics = read_run_file(path, what="the times of a run")
    if not is_metrics:
        raise DataError(
            "A text log does not tell what saves cost",
            where=file,
            expected=f"a run folder with {METRICS_FILE}, or such a file",
        )
    records, notes = parse_records(text, source=str(file))
    iterations = [
        _iteration(record, where) for where, record in records if "seconds" in record and "event" not in record
    ]
    saves = [_save(record, where) for where, record in records if record.get("event") == "save"]
    if not iterations:
        expected = "records with iteration, loss, seconds and tokens_per_second"
        raise DataError("There is no time of an iteration", where=file, expected=expected, found="none of these")
    return Timing(
        str(file),
        tuple(sorted(iterations, key=lambda timed: timed.iteration)),
        tuple(sorted(saves, key=lambda timed: timed.iteration)),
        tuple(notes),
    )


def measure(timing: Timing) -> Speed:
    """Work out the figures of a run."""
    seconds = [timed.seconds for timed in timing.iterations]
    blocked, slowdown = (sum(getattr(save, name) for save in timing.saves) for name in ("blocked_s", "slowdown_s"))
    total = sum(seconds) + blocked
    tokens = sum(timed.tokens_per_second * timed.seconds for timed in timing.iterations)
    return Speed(
        tokens_per_second=Spread.of([timed.tokens_per_second for timed in timing.iterations]),
        seconds=Spread.of(seconds),
        iterations=len(seconds),
        saves=len(timing.saves),
        save_seconds=median(save.seconds for save in timing.saves) if timing.saves else None,
        blocked_s=blocked,
        slowdown_s=slowdown,
        checkpoint_share=min(1.0, (blocked + max(0.0, slowdown)) / total),
        tokens_per_second_overall=tokens / total,
    )


def report_speeds(speeds: Mapping[str, Speed], *, skipped: int) -> str:
    """Say in two tables how fast runs were and what saves cost them; ratios are to the first run."""
    first = next(iter(speeds.values()))
    pace = [["run", "iterations", "tokens/s", "p10", "p90", "ratio", "s/iteration", "p10", "p90"]]
    cost = [["run", "saves", "s to commit", "blocked s", "slowed s", "share of time", "tokens/s overall", "ratio"]]
    for name, speed in speeds.items():
        tokens, seconds = speed.tokens_per_second, speed.seconds
        pace.append(
            [name, str(speed.iterations), *(f"{value:.1f}" for value in (tokens.median, tokens.p10, tokens.p90))]
        )
        pace[-1].append(_ratio(tokens.median, first.tokens_per_second.median))
        pace[-1] += [f"{value:.4g}" for value in (seconds.median, seconds.p10, seconds.p90)]
        overall = speed.tokens_per_second_overall
        cost.append([name, str(speed.saves), "-" if speed.save_seconds is None else f"{speed.save_seconds:.3f}"])
        cost[-1] += [f"{speed.blocked_s:.3f}", f"{speed.slowdown_s:.3f}", f"{speed.checkpoint_share:.2%}"]
        cost[-1] += [f"{overall:.1f}", _ratio(overall, first.tokens_per_second_overall)]
    rule = f"the first {skipped} iterations of each run, and saves of them, are left out; tokens/s is the median"
    return "\n".join([rule, "", *format_table(pace), "", *format_table(cost)])


def summarize_speeds(speeds: Mapping[str, Speed], timings: Sequence[Timing], *, skipped: int) -> dict[str, Any]:
    """Return the same for programs, as standard JSON."""
    first = next(iter(speeds.values()))
    runs = [
        {
            "run": name,
            "source": timing.source,
            "notes": list(timing.notes),
            **asdict(speed),
            "ratio": speed.tokens_per_second.median / first.tokens_per_second.median,
            "ratio_overall": speed.tokens_per_second_overall / first.tokens_per_second_overall,
        }
        for (name, speed), timing in zip(speeds.items(), timings, strict=True)
    ]
    return {"skipped": skipped, "runs": runs}


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.3f}"


def _iteration(record: Mapping[str, object], where: str) -> TimedIteration:
    seconds, tokens_per_second = (_number(record, name, where) for name in ("seconds", "tokens_per_second"))
    if not (seconds > 0 and tokens_per_second > 0):
        raise DataError("An iteration took no time", where=where, expected="more than 0", found=f"{seconds} s")
    return TimedIteration(int(_number(record, "iteration", where)), seconds, tokens_per_second)


def _save(record: Mapping[str, object], where: str) -> TimedSave:
    seconds, blocked, waited, slowdown = (
        _number(record, name, where) for name in ("seconds", "blocked_seconds", "waited_seconds", "slowdown_seconds")
    )
    return TimedSave(int(_number(record, "iteration", where)), seconds, blocked + waited, slowdown)


def _number(record: Mapping[str, object], name: str, where: str) -> float:
    value = record.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise DataError(f"Cannot read {name}", where=where, expected="a number", found=repr(value)[:60])
