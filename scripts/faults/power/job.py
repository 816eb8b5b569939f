"""Jobs of the trainer, forked from a process that has imported torch, for a fast start."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import trainer.__main__

_context = multiprocessing.get_context("forkserver")
_PRELOADED = ["hydra", "trainer.__main__", "trainer.restore", "trainer.loop", "torch.distributed.fsdp"]


class PowerJob:
    """Ranks of one job of the trainer, whose output goes to the end of a file."""

    def __init__(self, overrides: Sequence[str], output: Path, *, ranks: int) -> None:
        _context.set_forkserver_preload(_PRELOADED)  # not with the import: there is one such server in a process
        arguments = ["trainer", *overrides]
        port = _free_port()
        self._processes: list[ForkServerProcess] = [
            _context.Process(target=_train, args=(rank, ranks, port, arguments, str(output))) for rank in range(ranks)
        ]
        for process in self._processes:
            process.start()

    @property
    def is_running(self) -> bool:
        return any(process.is_alive() for process in self._processes)

    def end(self, timeout_s: float) -> list[int | None]:
        """Wait for the ranks and return their exit statuses; None for one that does not end in time and is killed."""
        try:
            for process in self._processes:
                process.join(timeout_s)
            return [process.exitcode for process in self._processes]
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill all ranks and wait for their end."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _train(rank: int, ranks: int, port: int, arguments: list[str], output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    if ranks > 1:
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # of so small a model, threads would wait for each other
    sys.argv = arguments
    trainer.__main__.main()
