"""Jobs of the trainer, forked from a process that has imported torch, for a fast start."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import trainer.__main__
from scripts.faults.ranks import become_rank, free_port

_context = multiprocessing.get_context("forkserver")
_PRELOADED = [
    "hydra",
    "trainer.__main__",
    "trainer.train_command",
    "trainer.start.fill",
    "trainer.training.loop",
    "torch.distributed.fsdp",
]


class PowerJob:
    """Ranks of a job of the trainer, whose output goes to the end of a file."""

    def __init__(self, overrides: Sequence[str], output: Path, *, ranks: int) -> None:
        _context.set_forkserver_preload(_PRELOADED)  # not with the import: there is one such server in a process
        arguments = ["trainer", *overrides]
        port = free_port()
        self._processes: list[ForkServerProcess] = [
            _context.Process(target=_train, args=(rank, ranks, port, arguments, str(output))) for rank in range(ranks)
        ]
        for process in self._processes:
            process.start()

    @property
    def is_running(self) -> bool:
        return any(process.is_alive() for process in self._processes)

    def end(self, timeout_s: float) -> list[int | None]:
        """Wait for the ranks and return their exit statuses; None for a rank killed after its time."""
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


def _train(rank: int, ranks: int, port: int, arguments: list[str], output: str) -> None:
    become_rank(rank, ranks, port=port, output=output)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # of so small a model, threads would wait for each other
    sys.argv = arguments
    trainer.__main__.main()
