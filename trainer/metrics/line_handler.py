"""Writes log lines to a stream, also after the stream's reader exits."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

_log = logging.getLogger(__name__)


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes lines until the pipe's reader exits, as `head` does, and from then on only warnings, to stderr."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Replace a pipe without a reader. The run continues."""
        if not isinstance(sys.exc_info()[1], BrokenPipeError):
            super().handleError(record)
            return
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.stream.fileno())  # buffered text would fail again, also at exit
        os.close(null)
        self.setStream(sys.stderr)
        self.setLevel(logging.WARNING)
        _log.warning("the output has no reader any more: warnings come here, and metrics.jsonl has all lines")
