"""Replaces standard streams closed by the caller (`>&-`) with the null device or a file in the run's folder."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TextIO

ERROR_LOG = "error.log"


class _ErrorLog(io.TextIOBase):
    """Replaces a closed stderr. Writes to stdout or, if stdout is closed too, to `error.log` in the run's folder."""

    def __init__(self, stdout: TextIO | None) -> None:
        self._target = stdout
        self.folder: Path | None = None  # set once the configuration is known

    def write(self, text: str) -> int:
        if self._target is None and self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._target = (self.folder / ERROR_LOG).open("a", buffering=1, encoding="utf-8")
        return len(text) if self._target is None else self._target.write(text)


def replace_closed() -> frozenset[str]:
    """Replace every closed standard stream, and return their names.

    Call this before opening any other file: a file with descriptor 1 would receive library output.
    """
    closed = frozenset(name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None)
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if "stdin" in closed:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - open until the process ends
    if "stdout" in closed:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - likewise
    if "stderr" in closed:
        sys.stderr = _ErrorLog(None if "stdout" in closed else sys.stdout)
    return closed


def keep_errors_in(folder: Path) -> None:
    """Set the folder for `error.log`, which the first error creates. No effect if a stream is open."""
    if isinstance(sys.stderr, _ErrorLog):
        sys.stderr.folder = folder
