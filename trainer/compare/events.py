"""Reads TensorBoard event files into a JSON table with each scalar's last value per step."""

from __future__ import annotations

import json
import os
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.types_pb2 import DT_DOUBLE, DT_FLOAT
from tensorboard.util.tensor_util import make_ndarray

from reprise.errors import count_of
from trainer.metrics.json_lines import open_log


def table_of(files: list[Path], notes: list[str]) -> str:
    """Return JSON rows with step, wall time in seconds and scalars by tag.

    A step that goes back replaces the later points in its curve.

    Args:
        files: A single run's files, in the order they were written.
        notes: Gets remarks on replaced points and damaged files.

    Raises:
        DataError: A file cannot be read.
    """
    series, replaced = dict[str, dict[int, tuple[float, float]]](), Counter[str]()
    for event in (event for file in files for event in _events(file, notes)):
        for value in event.summary.value:
            if value.tensor.dtype not in (DT_FLOAT, DT_DOUBLE) or (number := make_ndarray(value.tensor)).size != 1:
                continue
            points = series.setdefault(value.tag, {})
            while points and next(reversed(points)) >= event.step:
                points.popitem()
                replaced[value.tag] += 1
            points[event.step] = number.item(), event.wall_time
    for tag, count in replaced.most_common(1):
        notes.append(
            f"{files[0].parent}: {count_of(count, 'point')} of {tag} replaced by later ones; no curve has more"
        )
    rows = dict[int, dict[str, float]]()
    for tag, points in series.items():
        for step, (number, wall_time) in points.items():
            rows.setdefault(step, {"step": step, "wall_time": wall_time})[tag] = number
    return json.dumps(list(rows.values()))


def _events(file: Path, notes: list[str]) -> Iterator[Any]:
    """Yield a file's events up to its end, or up to the first torn or damaged record, with a note."""
    with open_log(file) as records:
        at = 0
        for event in EventFileLoader(str(file)).Load():
            (length,) = struct.unpack("<Q", records.read(8))
            at = records.seek(length + 8, os.SEEK_CUR)  # the message, and two checksums
            yield event
        if at < os.fstat(records.fileno()).st_size:
            notes.append(f"{file} is torn or damaged at byte {at}, and its later records were left out")
