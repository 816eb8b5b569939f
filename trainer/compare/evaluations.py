"""Reads the metrics that followers measured on a run's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from reprise.storage import Json, is_dir, matching
from trainer.compare.text_table import format_table
from trainer.metrics.json_lines import METRICS, read_records
from trainer.metrics.log_file import VALID_LOSS, MetricColumns

FOLLOW = "follow"  # the stem of the files that `reprise follow` writes
Series = dict[int, float]  # values by iteration


def with_losses(evaluations: MetricColumns, metrics: dict[str, Series]) -> dict[str, Series]:
    """Return a run's metrics with its validation losses first, both logged and followed. Logged losses win."""
    logged = dict(zip(evaluations.iterations.tolist(), evaluations.values[0].tolist(), strict=True))
    losses = metrics.get(VALID_LOSS, {}) | logged
    return {VALID_LOSS: losses} | metrics | {VALID_LOSS: losses} if losses else metrics


def read_evaluations(source: str | Path) -> dict[str, Series]:
    """Return a run's metrics by name, or an empty dict if no follower measured any.

    A metric in `follow.NAME.jsonl` is named `NAME: METRIC`. Lines from an abandoned branch are skipped.
    If an iteration repeats, the last line wins.

    Args:
        source: The run's folder, or its metrics.jsonl.

    Raises:
        DataError: A file cannot be read.
    """
    path, metrics = Path(source), dict[str, Series]()
    folder = path.parent if path.name == METRICS else path
    if is_dir(folder):
        for file in sorted([*matching(folder, f"{FOLLOW}.jsonl"), *matching(folder, f"{FOLLOW}.*.jsonl")]):
            prefix = file.name.removesuffix(".jsonl").removeprefix(FOLLOW).removeprefix(".")
            for name, series in _metrics(read_records(file)).items():
                metrics[f"{prefix}: {name}" if prefix else name] = series
    return metrics


def evaluation_table(runs: Mapping[str, Mapping[str, Series]]) -> list[str]:
    """Return a table with the runs' metrics, one column per run. Empty if there are none."""
    rows = [("metric", "iteration", *runs)]
    for metric in dict.fromkeys(name for metrics in runs.values() for name in metrics):
        columns = [series.get(metric, {}) for series in runs.values()]
        iterations = sorted({iteration for column in columns for iteration in column})
        rows += [
            (metric, str(n), *(f"{column[n]:.6g}" if n in column else "-" for column in columns)) for n in iterations
        ]
    return format_table([list(row) for row in rows], align=">") if len(rows) > 1 else []


def _metrics(records: Sequence[Json]) -> dict[str, Series]:
    """Return the metrics in a follower's lines."""
    metrics: dict[str, Series] = {}
    starts = [[branch["began_at"] for branch in record.get("branches") or ()] for record in records]
    newest = max(starts, key=len, default=[])
    for record, begun in zip(records, starts, strict=True):
        iteration, name, value = record["iteration"], record.get("metric"), record.get("value")
        is_abandoned = any(iteration > began_at for began_at in newest[len(begun) :])
        if isinstance(name, str) and isinstance(value, int | float) and not is_abandoned:
            metrics.setdefault(name, {})[iteration] = float(value)
    return metrics
