"""A progress bar at the bottom of a terminal, with log lines above it. Without a terminal there are only lines."""

from __future__ import annotations

import logging
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


def line_handler(stream: TextIO) -> logging.Handler:
    """Return the handler of log lines for a stream, above the progress bars on a terminal."""
    return logging.StreamHandler(_AboveBars(stream) if stream.isatty() else stream)
