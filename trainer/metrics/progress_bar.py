"""A progress bar on the terminal's last line, below the log lines. Without a terminal there are only log lines."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

_FORM = "{n_fmt}/{total_fmt} |{bar:30}| {desc} | eta {remaining}"


class RunBar:
    """A run's progress in iterations. Shows nothing if the stream is not a terminal."""

    def __init__(self, stream: TextIO, *, iteration: int, train_iters: int) -> None:
        self._bar: tqdm[object] | None = None
        if stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=train_iters,
                initial=iteration,
                file=stream,
                leave=False,
                dynamic_ncols=True,
                bar_format=_FORM,
            )

    def show(self, *, loss: float, tokens_per_second: float) -> None:
        """Advance by an iteration."""
        if self._bar is not None:
            self._bar.set_description_str(f"loss {loss:.4f} | {tokens_per_second:.0f} tok/s", refresh=False)
            self._bar.update()

    def close(self) -> None:
        """Remove the bar permanently."""
        if self._bar is not None:
            self._bar.close()


class _AboveBars:
    """A terminal stream for lines above its progress bars. Any thread may write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        from tqdm import tqdm

        tqdm.write(text, file=self._stream, end="")

    def flush(self) -> None:
        self._stream.flush()


class _LineHandler(logging.StreamHandler[TextIO]):
    """Writes lines until the pipe's reader exits, as `head` does, and from then on only warnings, to stderr."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Replace a pipe without a reader. The run continues."""
        if not isinstance(sys.exc_info()[1], BrokenPipeError):
            super().handleError(record)
            return
        was_stderr = self.stream is sys.stderr
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.stream.fileno())  # buffered text would fail again, also at exit
        os.close(null)
        if was_stderr:
            return
        self.setStream(sys.stderr)
        self.setLevel(logging.WARNING)
        form = "the output has no reader any more: the run continues, with warnings here and all lines in metrics.jsonl"
        self.handle(logging.LogRecord(record.name, logging.WARNING, record.pathname, record.lineno, form, None, None))


def line_handler(stream: TextIO) -> logging.Handler:
    """Return a log handler for a stream. On a terminal it writes above the progress bars."""
    return logging.StreamHandler(_AboveBars(stream)) if stream.isatty() else _LineHandler(stream)
