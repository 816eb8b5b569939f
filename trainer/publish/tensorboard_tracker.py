"""TensorBoard: event files of the published lines, one record a line, in double precision."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from typing import IO

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.scalar.metadata import create_summary_metadata
from tensorboard.plugins.text.metadata import create_summary_metadata as create_text_metadata
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from reprise.files import matching, read_regular, replace_file
from trainer.metrics.tensorboard_files import complete_records
from trainer.publish.tracker import RemoteRun, Tracker, TrackerRow

_EVENTS = "events.out.tfevents.{:010d}.reprise"
_HEAD_RECORDS = 2


class TensorboardTracker(Tracker):
    """A folder for each run with one event file; every record after the first two is a line."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None

    def open(self, run: RemoteRun) -> int:
        folder = run.folder / run.id
        folder.mkdir(exist_ok=True)
        self.place = str(folder)
        path = next(iter(matching(folder, "events.out.tfevents.*")), None)
        if path is None:
            path = folder / _EVENTS.format(int(time.time()))
            replace_file(run.files, path, _head(run))
        records = [record for record, _ in complete_records(read_regular(path))]
        self._close()
        self._file = path.open("r+b")
        self._file.truncate(sum(map(len, records)))
        self._file.seek(0, 2)
        return len(records) - _HEAD_RECORDS

    def send(self, rows: Sequence[TrackerRow]) -> None:
        assert self._file is not None
        writer = RecordWriter(self._file)
        for row in rows:
            values = [_scalar(name, value) for name, value in row.figures.items()]
            values += [_text(name, "    " + text.replace("\n", "\n    ")) for name, text in row.texts.items()]
            event = Event(step=row.iteration, wall_time=row.time, summary=Summary(value=values))
            writer.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _head(run: RemoteRun) -> bytes:
    """Return the first records of a file: its version, and the configuration as a text."""
    text = "\n".join(f"    {name}: {value}" for name, value in run.config.items())
    file = io.BytesIO()
    for event in (
        Event(file_version="brain.Event:2", wall_time=time.time()),
        Event(wall_time=time.time(), summary=Summary(value=[_text("config", text)])),
    ):
        RecordWriter(file).write(event.SerializeToString())
    return file.getvalue()


def _scalar(name: str, value: float) -> Summary.Value:
    tensor = make_tensor_proto(float(value), dtype="float64")
    return Summary.Value(tag=name, tensor=tensor, metadata=create_summary_metadata("", ""))


def _text(name: str, text: str) -> Summary.Value:
    tensor = make_tensor_proto([text.encode()])
    return Summary.Value(tag=name, tensor=tensor, metadata=create_text_metadata(name, ""))
