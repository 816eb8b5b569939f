"""Reads the metrics that followers measured on a run's checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reprise.storage import Json, matching
from trainer.metrics.json_lines import read_records

FOLLOW = "follow"  # the stem of the files that `reprise follow` writes
Series = dict[int, float]  # values by iteration


def read_evaluations(run: Path) -> dict[str, Series]:
    """Return a run's metrics by name, or an empty dict if no follower measured any.

    A metric in `follow.NAME.jsonl` is named `NAME: METRIC`. Lines from an abandoned branch are skipped.
    If an iteration repeats, the last line wins.

    Raises:
        DataError: A file cannot be read.
    """
    metrics = dict[str, Series]()
    for file in sorted([*matching(run, f"{FOLLOW}.jsonl"), *matching(run, f"{FOLLOW}.*.jsonl")]):
        prefix = file.name.removesuffix(".jsonl").removeprefix(FOLLOW).removeprefix(".")
        for name, series in _metrics(read_records(file)).items():
            metrics[f"{prefix}: {name}" if prefix else name] = series
    return metrics


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
