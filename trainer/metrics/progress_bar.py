"""A progress bar at the bottom of a terminal, with log lines above it. Without a terminal there are only lines."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

_FORM = "{n_fmt}/{total_fmt} |{bar:30}| {desc} | eta {remaining}"


class RunBar:
    """The progress of a run's iterations; shows nothing if the stream is not a terminal."""

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
        """Remove the bar for good."""
        if self._bar is not None:
            self._bar.close()


class _AboveBars:
    """A terminal to write lines to, above its progress bars; any thread may write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        from tqdm import tqdm

        tqdm.write(text, file=self._stream, end="")

    def flush(self) -> None:
        self._stream.flush()


class _LineHandler(logging.StreamHandler[TextIO]):
    """Writes lines until the reader of a pipe ends, as `head` does; then warnings alone, to stderr."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Replace a pipe without a reader; the run goes on."""
        if not isinstance(sys.exc_info()[1], BrokenPipeError):
            super().handleError(record)
            return
        was_stderr = self.stream is sys.stderr
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.stream.fileno())  # what is buffered would fail again, at exit too
        os.close(null)
        if was_stderr:
            return
        self.setStream(sys.stderr)
        self.setLevel(logging.WARNING)
        form = "nobody reads the output any more: the run goes on, with warnings here and its lines in metrics.jsonl"
        self.handle(logging.LogRecord(record.name, logging.WARNING, record.pathname, record.lineno, form, None, None))


def line_handler(stream: TextIO) -> logging.Handler:
    """Return the handler of log lines for a stream, above the progress bars on a terminal."""
    return logging.StreamHandler(_AboveBars(stream)) if stream.isatty() else _LineHandler(stream)
