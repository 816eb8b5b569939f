"""Starts ranks of a job on this host, with the variables that torchrun gives them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
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


def run_ranks(command: Sequence[str], ranks: int, *, timeout_s: float, hosts: int = 1) -> None:
    """Run a command once per rank, and wait for all.

    Args:
        hosts: how many hosts the ranks believe to be on, each with as many ranks.

    Raises:
        RuntimeError: if a rank failed.
        TimeoutExpired: if a rank did not end in time.
    """
    port, processes = free_port(), list[subprocess.Popen[bytes]]()
    try:
        for rank in range(ranks):
            environment = os.environ | rank_variables(rank, ranks, port=port, hosts=hosts)
            processes.append(subprocess.Popen(command, env=environment))
        statuses = [process.wait(timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(statuses):
        raise RuntimeError(f"ranks ended with {statuses}")


def rank_variables(rank: int, ranks: int, *, port: int, hosts: int = 1) -> dict[str, str]:
    """Return the environment variables of a rank; see `run_ranks`."""
    on_host = ranks // hosts
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank % on_host),
        "LOCAL_WORLD_SIZE": str(on_host),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def become_rank(rank: int, ranks: int, *, port: int, output: str) -> None:
    """Make this process rank `rank` of `ranks` on this host, with stdout and stderr at the end of `output`."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    if ranks > 1:
        os.environ |= rank_variables(rank, ranks, port=port)
