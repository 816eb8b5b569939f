"""Measures run speed, and what saves cost, from `metrics.jsonl` or another program's log."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy

from reprise.errors import DataError
from trainer.compare.logs import TextLog, parse_times
from trainer.compare.read import read_run
from trainer.compare.text_table import format_table
from trainer.metrics.json_lines import ABSENT, METRICS
from trainer.metrics.log_file import Floats, MetricColumns, MetricsLog, columns_of

_COLUMNS = ("seconds", "tokens_per_second")
QUANTILES = {"median": 0.5, "p10": 0.1, "p90": 0.9, "p25": 0.25, "p75": 0.75}
Row = dict[str, Any]
_SAVE = ("seconds", "blocked_seconds", "waited_seconds", "slowdown_seconds")


@dataclass(frozen=True, slots=True, eq=False)
class Timing:
    """A run's timed iterations and saves. `read_timing` returns at least one iteration.

    Attributes:
        columns: Seconds per iteration, without time blocked by saves, and tokens per second.
        starts: The place of the first iteration after each resume. Metrics from older versions lack it.
        saves: The committed saves' `_SAVE` figures.
    """

    source: str
    columns: MetricColumns
    saves: MetricColumns
    starts: Sequence[int] = ()
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_second(self) -> Floats:
        return self.columns.column(_COLUMNS[1])

    def without_first(self, count: int) -> Timing:
        """Drop the first `count` iterations after each start, and their saves.

        Raises:
            DataError: No iteration is left.
        """
        places, starts = numpy.arange(len(self.columns)), numpy.array([0, *self.starts])
        remaining = places - starts[starts.searchsorted(places, side="right") - 1] >= count
        if not remaining.any():
            raise DataError(
                "A run is too short to measure",
                where=self.source,
                expected=f"more than the {count} iterations left out after each start",
                found=len(self.columns),
                fix="Leave out fewer with --skip.",
            )
        saves = self.saves.take(~numpy.isin(self.saves.iterations, self.columns.iterations[~remaining]))
        return replace(self, columns=self.columns.take(remaining), starts=(), saves=saves)


def read_timing(path: str | Path, tokens: int | None = None) -> Timing:
    """Read the timing from a run folder, a metrics.jsonl, or another program's log.

    Args:
        tokens: Tokens per iteration. Required for another program's log, which does not state them.

    Raises:
        DataError: The file cannot be read, or has no timed iteration.
    """
    log = read_run(path, _COLUMNS)
    if not isinstance(log, MetricsLog):
        return _timing_of_log(log, tokens)
    columns, saves = log.readable(log.columns), log.readable(log.table("save", *_SAVE))
    if (saves.kinds == ABSENT).any():
        where = log.place(saves.lines[(saves.kinds == ABSENT).any(axis=0).argmax()])
        raise DataError("Cannot read a save's figures", where=where, expected=f"numbers under {', '.join(_SAVE)}")
    is_timed = columns.kinds[0] != ABSENT
    if not is_timed.any():
        expected = "records with iteration, loss, seconds and tokens_per_second"
        raise DataError("There are no iteration times", where=log.source, expected=expected, found="none of these")
    values = columns.values
    is_timeless = is_timed & ~((values > 0) & (values < math.inf)).all(axis=0)
    if is_timeless.any():
        place = is_timeless.argmax()
        where, seconds = log.place(columns.lines[place]), f"{values[0, place]} s"
        raise DataError("An iteration took no time", where=where, expected="more than 0", found=seconds)
    columns = columns.take(is_timed)
    resumed = [line for line, record in log.starts if record.get("resumed") is True]
    return Timing(log.source, columns, saves, columns.lines.searchsorted(resumed).tolist(), log.notes)


def _timing_of_log(log: TextLog, tokens: int | None) -> Timing:
    if tokens is None:
        raise DataError(
            "Another program's log does not state the tokens per iteration",
            where=log.source,
            expected=f"a run folder with {METRICS}, or such a file",
            fix="Pass them with --tokens: the global batch size times the sequence length.",
        )
    meaning, times = parse_times(log)
    records = [(0, {"iteration": n, "seconds": s, "tokens_per_second": tokens / s}) for n, s in times.items()]
    note = f"{log.source}: times from {meaning.program}, which may include saves and evaluations; {tokens} tokens each"
    return Timing(log.source, columns_of(records, _COLUMNS), columns_of([], _SAVE), notes=(*log.notes, note))


def measure(timing: Timing) -> Row:
    """Return a run's speed figures:

    * tokens_per_second, seconds: The spread over iterations, without time blocked by saves.
    * save_seconds: Median seconds from call to commit. None without saves.
    * blocked_s: Total seconds that training waited for saves.
    * slowdown_s: Total extra seconds in iterations while saves were written, relative to the median before. 0 if they
      were not slower.
    * checkpoint_share: `blocked_s` plus `slowdown_s`, as a share of the total time.
    * tokens_per_second_overall: All tokens divided by the total time, including blocked time.
    """
    save_seconds, *waits, slowdowns = timing.saves.values
    blocked = float(sum(map(sum, waits)))
    slowdown = max(0.0, float(slowdowns.sum()))  # iterations during saves may be faster by chance
    seconds, speeds = timing.columns.values
    total, tokens = float(seconds.sum()) + blocked, float((speeds * seconds).sum())
    return {
        "tokens_per_second": _spread(speeds),
        "seconds": _spread(seconds),
        "iterations": len(timing.columns),
        "saves": len(timing.saves),
        "save_seconds": median(save_seconds.tolist()) if len(timing.saves) else None,
        "blocked_s": blocked,
        "slowdown_s": slowdown,
        "checkpoint_share": min(1.0, (blocked + slowdown) / total),
        "tokens_per_second_overall": tokens / total,
    }


def _spread(values: Floats) -> dict[str, float]:
    return dict(zip(QUANTILES, numpy.quantile(values, [*QUANTILES.values()]).tolist(), strict=True))


def summarize_speeds(timings: Mapping[str, Timing], *, skipped: int, threshold: float) -> Row:
    """Return all runs' figures as standard JSON, with ratios to the first run.

    Args:
        skipped: How many iterations were dropped after each start.
        threshold: The allowed shortfall in median tokens per second, as a share of the first run's.
    """
    runs = [
        {"run": name, "source": timing.source, "notes": list(timing.notes), **measure(timing)}
        for name, timing in timings.items()
    ]
    for run in runs:
        ratio = run["tokens_per_second"]["median"] / runs[0]["tokens_per_second"]["median"]
        overall = run["tokens_per_second_overall"] / runs[0]["tokens_per_second_overall"]
        run |= {"ratio": ratio, "ratio_overall": overall, "slower_by": 1 - ratio, "is_slower": 1 - ratio > threshold}
    slower = [run["run"] for run in runs if run["is_slower"]]
    return {"skipped": skipped, "threshold": threshold, "runs": runs, "slower": slower}


def report_speeds(summary: Mapping[str, Any]) -> str:
    """Return tables with the runs' speed and their saves' cost. For several runs, the last line is the verdict."""
    runs, slower = summary["runs"], summary["slower"]
    pace = [["run", "iterations", "tok/s", "p10", "p25", "p75", "p90", "ratio", "s/iteration", "p10", "p90", "verdict"]]
    cost = [["run", "saves", "s to commit", "blocked s", "slowed s", "share of time", "tok/s overall", "ratio"]]
    for run in runs:
        name, tokens, seconds, save_s = run["run"], run["tokens_per_second"], run["seconds"], run["save_seconds"]
        speeds = [f"{tokens[key]:.1f}" for key in ("median", "p10", "p25", "p75", "p90")]
        times = [f"{seconds[key]:.4g}" for key in ("median", "p10", "p90")]
        verdict = "base" if run is runs[0] else "SLOWER" if run["is_slower"] else "ok"
        pace.append([name, str(run["iterations"]), *speeds, f"{run['ratio']:.3f}", *times, verdict])
        cost.append([name, str(run["saves"]), "-" if save_s is None else f"{save_s:.3f}"])
        cost[-1] += [f"{run['blocked_s']:.3f}", f"{run['slowdown_s']:.3f}", f"{run['checkpoint_share']:.2%}"]
        cost[-1] += [f"{run['tokens_per_second_overall']:.1f}", f"{run['ratio_overall']:.3f}"]
    skipped = summary["skipped"]
    rule = f"the first {skipped} iterations after each start, and their saves, are left out; tok/s is the median"
    lines = [rule, "", *format_table(pace), "", *format_table(cost)]
    if len(runs) > 1:
        limit = f"{runs[0]['run']} by more than {100 * summary['threshold']:g}% of its median"
        is_slower = f"SLOWER: {len(slower)} of {len(runs) - 1} runs than {limit}: {', '.join(slower)}"
        is_fine = f"ok: 0 of {len(runs) - 1} runs are slower than {limit}"
        lines += ["", is_slower if slower else is_fine]
    return "\n".join(lines)
