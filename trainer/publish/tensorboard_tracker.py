"""TensorBoard: event files of the published lines, one record a line, in double precision."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import IO

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.scalar.metadata import create_summary_metadata
from tensorboard.plugins.text.metadata import create_summary_metadata as create_text_metadata
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from reprise.storage import matching
from trainer.publish.tracker import RemoteRun, Tracker, TrackerRow

_EVENTS = "events.out.tfevents.{:010d}.reprise.{:04d}"


class TensorboardTracker(Tracker):
    """A folder for each run, to which every launch adds an event file."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None

    def open(self, run: RemoteRun) -> None:
        self.close()
        folder = run.folder / run.id
        folder.mkdir(exist_ok=True)
        self.place = str(folder)
        number = len(matching(folder, "events.out.tfevents.*"))
        self._file = (folder / _EVENTS.format(int(time.time()), number)).open("xb")
        text = "\n".join(f"    {name}: {value}" for name, value in run.config.items())
        head = Event(file_version="brain.Event:2", wall_time=time.time())
        self._write([head, Event(wall_time=time.time(), summary=Summary(value=[_text("config", text)]))])

    def send(self, rows: Sequence[TrackerRow]) -> None:
        events = list[Event]()
        for row in rows:
            values = [_scalar(name, value) for name, value in row.figures.items()]
            values += [_text(name, "    " + text.replace("\n", "\n    ")) for name, text in row.texts.items()]
            events.append(Event(step=row.iteration, wall_time=row.time, summary=Summary(value=values)))
        self._write(events)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, events: Sequence[Event]) -> None:
        assert self._file is not None
        writer = RecordWriter(self._file)
        for event in events:
            writer.write(event.SerializeToString())
        self._file.flush()
        os.fsync(self._file.fileno())


def _scalar(name: str, value: float) -> Summary.Value:
    tensor = make_tensor_proto(float(value), dtype="float64")
    return Summary.Value(tag=name, tensor=tensor, metadata=create_summary_metadata("", ""))


def _text(name: str, text: str) -> Summary.Value:
    tensor = make_tensor_proto([text.encode()])
    return Summary.Value(tag=name, tensor=tensor, metadata=create_text_metadata(name, ""))
