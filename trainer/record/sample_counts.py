"""Counts of samples in a saved state, as samples of another length. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from reprise.json_file import Json
from trainer.schedules.batch_size import BatchSchedule, parse_batch_schedule


def in_samples_of(seq_length: object, saved: Json) -> Json:
    """Return a state whose schedules count samples of `seq_length` tokens, as the position of a resumed run does.

    Counts are rounded down, as the position is. Malformed parts, and counts of iterations, stay as they are.

    Args:
        saved: `trainer_state.json`.
    """
    batch, schedule = saved.get("batch"), saved.get("schedule")
    was = batch.get("seq_length") if isinstance(batch, Mapping) else None
    if type(was) is not int or type(seq_length) is not int or was == seq_length or min(was, seq_length) < 1:
        return saved
    converted = dict(saved)
    if isinstance(schedule, Mapping):
        converted["schedule"] = {
            name: value * was // seq_length if name.endswith("_samples") and type(value) is int else value
            for name, value in schedule.items()
        }
    if isinstance(batch, Mapping) and isinstance(batch.get("batch_schedule"), str):
        converted["batch"] = {**batch, "batch_schedule": _converted(batch["batch_schedule"], was, seq_length)}
    return converted


def _converted(text: str, was: int, now: int) -> str:
    try:
        steps = parse_batch_schedule(text).steps
    except ValueError:
        return text
    return str(BatchSchedule(tuple((first * was // now, size) for first, size in steps)))
