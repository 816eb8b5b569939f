"""Writes log lines to a stream, also after the stream's reader exits."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO


class LineHandler(logging.StreamHandler[TextIO]):
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
