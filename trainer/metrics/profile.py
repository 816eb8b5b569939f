"""Writes torch.profiler traces over a range of iterations."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reprise.storage import FILE_SYSTEM, make_folders

_log = logging.getLogger(__name__)

FOLDER = "profile"  # inside the run's folder


class Profiler:
    """Writes a trace per rank in Chrome's format, from the first iteration in `steps` to the last.

    If the run ends earlier, the trace is shorter. A failed write is logged, and training continues.

    Args:
        folder: The run's folder.
        steps: The first and the last iteration. Empty disables tracing.
    """

    def __init__(self, folder: Path, steps: Sequence[int], *, rank: int) -> None:
        self._folder, self._steps, self._rank = folder / FOLDER, tuple(steps), rank
        self._profile: Any = None

    @contextmanager
    def around(self, iteration: int) -> Iterator[None]:
        """Trace the block if its iteration is within `steps`, and write the trace after the last."""
        if self._steps and self._steps[0] <= iteration <= self._steps[1] and self._profile is None:
            from torch import profiler  # takes a second to import, so only when needed

            self._profile = profiler.profile()
            self._profile.start()
        yield
        if self._steps and iteration == self._steps[1]:
            self.close()

    def close(self) -> None:
        """Write the unfinished trace, if any."""
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        profile.stop()
        path = self._folder / f"iterations_{self._steps[0]}-{self._steps[1]}.rank{self._rank}.json.gz"
        try:
            make_folders(FILE_SYSTEM, self._folder)
            profile.export_chrome_trace(str(path))
            _log.info(f"rank {self._rank}: trace of iterations {self._steps[0]} to {self._steps[1]}: {path}")
        except OSError as error:
            _log.error("The trace cannot be written to %s: %s", path, error)
