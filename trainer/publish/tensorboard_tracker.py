"""TensorBoard. Writes the published lines to event files, an event per line, in double precision."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.metrics.event_file import EventFile, double_point, event, verbatim
from trainer.publish.tracker import RemoteRun, Tracker, TrackerRow


class TensorboardTracker(Tracker):
    """A folder per run. Every launch adds an event file."""

    _run: EventFile | None = None

    def open(self, run: RemoteRun) -> None:
        self.close()
        self.place = str(run.folder / run.id)
        self._run = EventFile(run.folder / run.id)
        settings = "\n".join(f"{name}: {value}" for name, value in run.config.items())
        self._run.write([event(0, [verbatim("config", settings)])])

    def send(self, rows: Sequence[TrackerRow]) -> None:
        assert self._run is not None
        events = []
        for row in rows:
            values = [double_point(name, value) for name, value in row.figures.items()]
            values += [verbatim(name, text) for name, text in row.texts.items()]
            events.append(event(row.iteration, values, seconds=row.time))
        self._run.write(events)
        self._run.sync()

    def close(self) -> None:
        if self._run is not None:
            self._run.close()
            self._run = None
