"""The speed of runs, and the cost of their saves, from their `metrics.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy

from reprise.errors import DataError
from reprise.storage import finite_number
from trainer.compare.read import read_run
from trainer.compare.text_table import format_table
from trainer.metrics.json_lines import ABSENT, METRICS
from trainer.metrics.log_file import Floats, MetricColumns, MetricsLog

_COLUMNS = ("seconds", "tokens_per_second")


@dataclass(frozen=True, slots=True)
class TimedSave:
    """The duration of a committed save, and the time it blocked and slowed training, in seconds."""

    iteration: int
    seconds: float
    blocked_s: float
    slowdown_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Timing:
    """All iterations and saves of a run; `read_timing` returns at least one iteration.

    Attributes:
        columns: the seconds of iterations, without time blocked by saves, and their tokens per second.
        starts: the place of the first iteration after each resume; metrics of older versions lack this.
    """

    source: str
    columns: MetricColumns
    starts: Sequence[int] = ()
    saves: Sequence[TimedSave] = ()
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_second(self) -> Floats:
        return self.columns.column(_COLUMNS[1])

    def without_first(self, count: int) -> Timing:
        """Leave out the first `count` iterations after each start, and their saves.

        Raises:
            DataError: nothing is left.
        """
        places, starts = numpy.arange(len(self.columns)), numpy.array([0, *self.starts])
        remaining = places - starts[starts.searchsorted(places, side="right") - 1] >= count
        if not remaining.any():
            raise DataError(
                "A run is too short to measure",
                where=self.source,
                expected=f"more than the {count} iterations that are left out after each start",
                found=len(self.columns),
                fix="Leave out fewer with --skip.",
            )
        skipped = set(self.columns.iterations[~remaining].tolist())
        saves = [save for save in self.saves if save.iteration not in skipped]
        return replace(self, columns=self.columns.take(remaining), starts=(), saves=saves)


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values, and their quantiles 0.1, 0.25, 0.75 and 0.9."""

    median: float
    p10: float
    p90: float
    p25: float
    p75: float

    @staticmethod
    def of(values: Sequence[float] | Floats) -> Spread:
        """Return the spread of one or more values, with linear interpolation."""
        return Spread(*numpy.quantile(values, (0.5, 0.1, 0.9, 0.25, 0.75)).tolist())


@dataclass(frozen=True, slots=True)
class Speed:
    """The figures of a run.

    Attributes:
        tokens_per_second: of the iterations, without time blocked by saves.
        seconds: of an iteration.
        saves: number of committed saves.
        save_seconds: median from the call to the commit; None without saves.
        blocked_s: total time of training's waits for saves.
        slowdown_s: total excess time of iterations while saves were written, relative to the median before; 0 if they
            were not slower.
        checkpoint_share: share of these two in the total time.
        tokens_per_second_overall: all tokens per total time.
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
    """Read the timing of a run folder, or of its metrics.jsonl.

    Raises:
        DataError: the file cannot be read, is a text log, or has no timed iteration.
    """
    log = read_run(path, _COLUMNS)
    if not isinstance(log, MetricsLog):
        expected = f"a run folder with {METRICS}, or such a file"
        raise DataError("A text log has no timing of saves", where=log[0], expected=expected)
    log.require_usable(*_COLUMNS)
    saves = [_save(record, log.place(line)) for line, record in log.events if record["event"] == "save"]
    is_timed = log.columns.kinds[0] != ABSENT
    if not is_timed.any():
        expected = "records with iteration, loss, seconds and tokens_per_second"
        raise DataError("There is no time of an iteration", where=log.source, expected=expected, found="none of these")
    values = log.columns.values
    is_timeless = is_timed & ~((values > 0) & (values < math.inf)).all(axis=0)
    if is_timeless.any():
        place = is_timeless.argmax()
        where, seconds = log.place(log.lines[place]), f"{values[0, place]} s"
        raise DataError("An iteration took no time", where=where, expected="more than 0", found=seconds)
    resumed = [place for place, record in log.starts if record.get("resumed") is True]
    starts = numpy.cumsum(is_timed)[resumed] - 1
    return Timing(log.source, log.columns.take(is_timed), starts.tolist(), saves, log.notes)


def measure(timing: Timing) -> Speed:
    """Compute the figures of a run."""
    blocked, slowdown = (sum(getattr(save, name) for save in timing.saves) for name in ("blocked_s", "slowdown_s"))
    slowdown = max(0.0, slowdown)  # iterations beside saves may be faster by chance
    seconds, speeds = timing.columns.values
    total, tokens = float(seconds.sum()) + blocked, float((speeds * seconds).sum())
    return Speed(
        tokens_per_second=Spread.of(speeds),
        seconds=Spread.of(seconds),
        iterations=len(timing.columns),
        saves=len(timing.saves),
        save_seconds=median(save.seconds for save in timing.saves) if timing.saves else None,
        blocked_s=blocked,
        slowdown_s=slowdown,
        checkpoint_share=min(1.0, (blocked + slowdown) / total),
        tokens_per_second_overall=tokens / total,
    )


def report_speeds(speeds: Mapping[str, Speed], *, skipped: int) -> str:
    """Return two tables, the speed of runs and the cost of their saves; ratios are relative to the first run."""
    first = next(iter(speeds.values()))
    pace = [["run", "iterations", "tok/s", "p10", "p90", "ratio", "s/iteration", "p10", "p90"]]
    cost = [["run", "saves", "s to commit", "blocked s", "slowed s", "share of time", "tok/s overall", "ratio"]]
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
    rule = f"the first {skipped} iterations after each start, and saves of them, are left out; tok/s is the median"
    return "\n".join([rule, "", *format_table(pace), "", *format_table(cost)])


def slower_by(speeds: Mapping[str, Speed]) -> dict[str, float]:
    """Return each run's shortfall in median tokens per second, as a share of the first run's; negative if faster."""
    first = next(iter(speeds.values())).tokens_per_second.median
    return {name: 1 - speed.tokens_per_second.median / first for name, speed in speeds.items()}


def slower_runs(speeds: Mapping[str, Speed], threshold: float) -> list[str]:
    """Return the runs whose median tokens per second fall short of the first run's by more than `threshold`."""
    return [name for name, share in slower_by(speeds).items() if share > threshold]


def report_verdicts(speeds: Mapping[str, Speed], *, threshold: float) -> str:
    """Return a table of the runs' tokens per second against the first run's; the last line is the verdict on all.

    Args:
        speeds: of at least two runs.
        threshold: allowed shortfall as a share of the first run's median.
    """
    base, *compared = speeds
    slower, shares = slower_runs(speeds, threshold), slower_by(speeds)
    rows = [["run", "verdict", "against the first", "tok/s", "quartiles"]]
    for name, speed in speeds.items():
        spread = speed.tokens_per_second
        verdict = "base" if name == base else "SLOWER" if name in slower else "ok"
        change = "-" if name == base else f"{0.0 - shares[name]:+.1%}"
        rows.append([name, verdict, change, f"{spread.median:.1f}", f"{spread.p25:.1f} to {spread.p75:.1f}"])
    limit = f"by more than {100 * threshold:g}% of its median"
    if slower:
        summary = f"SLOWER: {len(slower)} of {len(compared)} runs than {base} {limit}: {', '.join(slower)}"
    else:
        summary = f"ok: 0 of {len(compared)} runs are slower than {base} {limit}"
    return "\n".join([*format_table(rows), "", summary])


def summarize_speeds(
    speeds: Mapping[str, Speed], timings: Sequence[Timing], *, skipped: int, threshold: float
) -> dict[str, Any]:
    """Return the figures of all runs as standard JSON."""
    first = next(iter(speeds.values()))
    slower, shares = slower_runs(speeds, threshold), slower_by(speeds)
    runs = [
        {
            "run": name,
            "source": timing.source,
            "notes": list(timing.notes),
            **asdict(speed),
            "ratio": speed.tokens_per_second.median / first.tokens_per_second.median,
            "ratio_overall": speed.tokens_per_second_overall / first.tokens_per_second_overall,
            "slower_by": shares[name],
            "is_slower": name in slower,
        }
        for (name, speed), timing in zip(speeds.items(), timings, strict=True)
    ]
    return {"skipped": skipped, "threshold": threshold, "runs": runs, "slower": slower}


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.3f}"


def _save(record: Mapping[str, object], where: str) -> TimedSave:
    names = ("iteration", "seconds", "blocked_seconds", "waited_seconds", "slowdown_seconds")
    try:
        iteration, seconds, blocked, waited, slowdown = (finite_number(record.get(name)) for name in names)
    except ValueError as error:
        raise DataError(
            "Cannot read the figures of a save", where=where, expected=f"numbers under {', '.join(names)}", found=error
        ) from error
    return TimedSave(int(iteration), seconds, blocked + waited, slowdown)
