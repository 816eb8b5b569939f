"""Starts ranks of a job on this host, with the variables that torchrun gives them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


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
