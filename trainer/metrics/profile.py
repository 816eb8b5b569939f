"""Writes torch.profiler traces over a range of iterations, and a memory snapshot when a device runs out of memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from reprise.storage import FILE_SYSTEM, Files, make_folders

_log = logging.getLogger(__name__)

FOLDER = "profile"  # inside the run's folder


class Profiler:
    """Writes a trace per rank in Chrome's format, from the first iteration in `steps` to the last.

    If the run ends earlier, the trace is shorter. A failed write is logged, and training continues.

    Args:
        folder: The run's folder.
        steps: The first and the last iteration. Empty disables tracing.
    """

    def __init__(
        self, folder: Path, steps: Sequence[int], *, rank: int, device: torch.device, files: Files = FILE_SYSTEM
    ) -> None:
        self._files = files
        self._folder, self._steps, self._rank, self._device = folder / FOLDER, tuple(steps), rank, device
        self._profile: Any = None
        if self._steps and self._has_memory_history:
            torch.cuda.memory._record_memory_history("state")

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
        if self._is_written("The trace", path, lambda: profile.export_chrome_trace(str(path))):
            _log.info(f"rank {self._rank}: trace of iterations {self._steps[0]} to {self._steps[1]}: {path}")

    @contextmanager
    def watching_memory(self, dump: Callable[[str], None] | None = None) -> Iterator[None]:
        """Write a device memory snapshot if the block raises `torch.OutOfMemoryError`, then re-raise.

        View the file at https://pytorch.org/memory_viz. It includes allocation stacks if `steps` is set.

        Args:
            dump: Writes the snapshot to a path. None uses torch's function, which only CUDA has.
        """
        if dump is None and self._has_memory_history:
            dump = torch.cuda.memory._dump_snapshot
        try:
            yield
        except torch.OutOfMemoryError:
            path = self._folder / f"memory.rank{self._rank}.pickle"
            if dump is not None and self._is_written("The memory snapshot", path, lambda: dump(str(path))):
                _log.error(f"rank {self._rank} ran out of memory; a snapshot for pytorch.org/memory_viz: {path}")
            raise

    @property
    def _has_memory_history(self) -> bool:
        return self._device.type == "cuda"

    def _is_written(self, noun: str, path: Path, write: Callable[[], None]) -> bool:
        try:
            make_folders(self._files, path.parent)
            write()
        except OSError as error:
            _log.error("%s cannot be written to %s: %s", noun, path, error)
            return False
        return True
