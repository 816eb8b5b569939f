"""The TensorBoard sink: curves in event files inside the run's folder."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from reprise.storage import Json
from trainer.metrics.figures import figures_of
from trainer.metrics.sink import MetricSink

if TYPE_CHECKING:
    from trainer.metrics.event_file import EventFile

# TensorBoard sorts tag groups by name. These names put the losses first.
_TAGS = {
    "train/loss": "loss/train",
    "valid/loss": "loss/valid",
    "valid/ema_loss": "loss/valid_ema",
    "checkpoint/blocked_seconds": "train/blocked_seconds",
}
_GROUPS = ("train", "valid", "checkpoint", "save")
_LEFT_OUT = ("train/consumed_samples", "train/seconds", "train/data_seconds", "train/resumed", "train/skipped")


class TensorboardSink(MetricSink):
    """Writes event files. After a disk error it starts a new file.

    A resume marks its first iteration. At each curve's next point TensorBoard then drops the abandoned points, but
    other readers still see them.
    """

    name = "tensorboard"
    _folder = Path()
    _file: EventFile | None = None
    _purge_step = 1
    _is_broken = False

    def start(self, folder: Path, iteration: int) -> None:
        self._folder, self._purge_step = folder / self.name, iteration + 1

    def write(self, record: Json) -> None:
        figures, _ = figures_of(record)
        points = {tag: value for name, value in figures.items() if (tag := _tag(name))}
        if self._is_broken or not points:
            return
        self._is_broken = True  # unless the import, which takes as long each time, succeeds
        from trainer.metrics import event_file  # takes 0.07 s, for which the first iteration does not wait

        self._is_broken = False
        try:
            if self._file is None:  # created with the first point, so that a run without points leaves no file
                self._file = event_file.EventFile(self._folder, purge_step=self._purge_step)
            values = [event_file.point(tag, value) for tag, value in points.items()]
            self._file.write([event_file.event(record["iteration"], values)])
        except OSError:
            self.close()
            self._purge_step = record["iteration"] + 1
            raise

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._file = None


@cache
def _tag(name: str) -> str:
    """Return the tag for a figure, or an empty one if it is not drawn."""
    is_drawn = name.partition("/")[0] in _GROUPS and name not in _LEFT_OUT
    return _TAGS.get(name, name) if is_drawn else ""
