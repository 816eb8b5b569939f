"""Replaces standard streams closed by the caller (`>&-`) with the null device."""

from __future__ import annotations

import os
import sys


def replace_closed() -> bool:
    """Replace every closed standard stream, and return whether stdout was closed. A closed stderr writes to stdout.

    Call this before opening any other file: a file with descriptor 1 would receive library output.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    is_silent = sys.stdout is None
    # The files stay open until the process ends.
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or sys.stdout
    return is_silent
