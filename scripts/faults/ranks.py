"""Starts ranks on this host."""

from __future__ import annotations

import os
import socket
import sys
from itertools import count

# Below the ports that Linux gives to connections, so that none of them takes a port between its choice and its use.
# Processes that follow each other, as the workers of a test run, begin far apart.
_PORTS = range(10_000, 32_768)
_PORTS_OF_A_PROCESS = 500
_NUMBERS = count()


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on, and which no later call in this process returns."""
    for number in _NUMBERS:
        port = _PORTS[(os.getpid() * _PORTS_OF_A_PROCESS + number) % len(_PORTS)]
        with socket.socket() as server:
            try:
                server.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("the count does not end")


def launcher(ranks: int) -> list[str]:
    """Return the command that starts a script or module on so many ranks: Python alone, or torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, *(torchrun if ranks > 1 else ())]
