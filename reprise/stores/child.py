"""The environment of a process that this library starts for a store."""

from __future__ import annotations

import os
import sys


def child_environment() -> dict[str, str]:
    """Return this process's environment variables, with which a Python finds the modules that this one finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
