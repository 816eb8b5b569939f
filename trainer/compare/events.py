"""Reads TensorBoard event files into a JSON table."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.types_pb2 import DT_DOUBLE, DT_FLOAT
from tensorboard.util.tensor_util import make_ndarray

from trainer.metrics.json_lines import open_log


def table_of(files: list[Path], notes: list[str]) -> str:
    """Return JSON rows with step, wall time in seconds and scalars by tag, launch after launch.

    A launch ends where a tag's step goes back. A repeated step has its last value.

    Args:
        files: A single run's files, in the order they were written.
        notes: Gets remarks on damaged files.

    Raises:
        DataError: A file cannot be read.
    """
    launches, last = [dict[int, dict[str, float]]()], dict[str, int]()
    for event in (event for file in files for event in _events(file, notes)):
        for value in event.summary.value:
            if value.tensor.dtype not in (DT_FLOAT, DT_DOUBLE) or (number := make_ndarray(value.tensor)).size != 1:
                continue
            if event.step < last.get(value.tag, 0):
                launches.append({})
                last.clear()
            last[value.tag] = event.step
            row = launches[-1].setdefault(event.step, {"step": event.step, "wall_time": event.wall_time})
            row[value.tag] = number.item()
    return json.dumps([rows[step] for rows in launches for step in sorted(rows)])


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
