"""Reads TensorBoard event files into a JSON table with each scalar's last value per step."""

from __future__ import annotations

import json
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.types_pb2 import DT_DOUBLE, DT_FLOAT
from tensorboard.util.tensor_util import make_ndarray


def table_of(files: list[Path]) -> str:
    """Return JSON rows with step, wall time in seconds and scalars by tag.

    A step that goes back replaces the later points in its curve.

    Args:
        files: A single run's files, in the order they were written.
    """
    series = dict[str, dict[int, tuple[float, float]]]()
    for event in (event for file in files for event in EventFileLoader(str(file)).Load()):
        for value in event.summary.value:
            if value.tensor.dtype not in (DT_FLOAT, DT_DOUBLE) or (number := make_ndarray(value.tensor)).size != 1:
                continue
            points = series.setdefault(value.tag, {})
            while points and next(reversed(points)) >= event.step:
                points.popitem()
            points[event.step] = number.item(), event.wall_time
    rows = dict[int, dict[str, float]]()
    for tag, points in series.items():
        for step, (number, wall_time) in points.items():
            rows.setdefault(step, {"step": step, "wall_time": wall_time})[tag] = number
    return json.dumps(list(rows.values()))
