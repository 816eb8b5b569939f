"""Kills a loop of one's own at random moments, starts it again each time, and compares it with an unbroken one."""

from __future__ import annotations

import contextlib
import importlib
import random
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from tests import ROOT
from tests.harness import Running, call_on_ranks, started, tensor_files

TIMEOUT_S = 900.0
LONGEST_PAUSE_S = 0.05
_MOST_RUNS = 10


@dataclass(frozen=True, slots=True)
class Loop:
    """A program of `examples/`.

    Args:
        arguments: of its `main`, behind the folder.
        whole: those of the unbroken run, if they are others.
    """

    name: str
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    whole: tuple[str, ...] | None = None


@dataclass(slots=True)
class Tally:
    """What the kills have met.

    Args:
        kills: how many there were.
        in_saves: how many left an attempt behind, and so came within a save.
        lost: iterations that were trained again.
    """

    kills: int = 0
    in_saves: int = 0
    lost: int = 0


def run_main(arguments: list[str]) -> None:
    """Call `main` of an example: its name, the folder, the number of iterations, and the rest."""
    name, folder, iterations, *rest = arguments
    torch.set_num_threads(1)
    random.seed(0)  # the example does not: it draws from torch alone
    np.random.seed(0)
    sys.path.insert(0, str(ROOT))  # from which spawned workers import it too
    importlib.import_module(f"examples.{name}").main(Path(folder), *rest, iterations=int(iterations))


def figures(text: str) -> dict[int, str]:
    """Return the figures of the whole lines that a rank has printed, by iteration."""
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    found = [line.split(maxsplit=1) for line in lines if line.split(" ")[0].isdigit()]
    return {int(iteration): "".join(rest).strip() for iteration, *rest in found}


def unbroken(loop: Loop, folder: Path, iterations: int) -> list[dict[int, str]]:
    """Run a loop to its end and return each rank's figures."""
    given = loop.arguments if loop.whole is None else loop.whole
    arguments = [loop.name, str(folder), str(iterations), *given]
    ended = call_on_ranks(run_main, arguments, folder=folder, ranks=loop.ranks, timeout_s=2 * TIMEOUT_S)
    assert ended.ok, ended.text
    return [figures(output) for output in ended.outputs]


def kill_at_random(loop: Loop, folder: Path, *, kills: int, iterations: int, seed: int = 0) -> Tally:
    """Run a loop, kill all ranks `kills` times, and check figures and files against an unbroken run.

    Raises:
        AssertionError: for other figures or files, or a launch that fails by itself.
    """
    expected = unbroken(loop, folder / "whole", iterations)
    draw, tally = random.Random(seed), Tally()
    for number in range(_MOST_RUNS):  # a fast run may end before its kill
        _kill_run(loop, folder, f"killed{number}", expected, tally, draw, kills=kills, iterations=iterations)
        if tally.kills == kills:
            break
    return tally


def _kill_run(
    loop: Loop,
    folder: Path,
    name: str,
    expected: list[dict[int, str]],
    tally: Tally,
    draw: random.Random,
    *,
    kills: int,
    iterations: int,
) -> None:
    """Run a loop until it has ended, kill it until there are so many kills, and check it."""
    workers, saves, last = list[psutil.Process](), folder / name, 0
    while last < iterations:
        arguments = [loop.name, str(saves), str(iterations), *loop.arguments]
        for output in folder.glob(f"{name}.rank*.log"):
            output.unlink()  # else its lines would count for this launch
        with started(run_main, arguments, folder=saves, ranks=loop.ranks) as running:
            is_killed = tally.kills < kills and kill(running, draw, workers)
            running.join(TIMEOUT_S)
        ended = running.ended()
        assert is_killed or ended.ok, ended.text
        for output, lines in zip(ended.outputs, expected, strict=True):
            printed = figures(output)
            assert printed.items() <= lines.items(), f"after {tally}: {printed}, not {lines}"
            tally.lost += sum(iteration <= last for iteration in printed)
        tally.kills += is_killed
        tally.in_saves += is_killed and any(saves.glob(".iter_*.partial"))
        last = max([last, *(max(figures(output), default=0) for output in ended.outputs)]) if is_killed else iterations
        if is_killed and last == iterations:
            last -= 1  # it may have printed its last figure and not have saved it
    for worker in workers:  # those started a moment before the kill do not see that their parent is gone
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
    end = f"iter_{iterations:07d}"
    assert tensor_files(saves / end) == tensor_files(folder / "whole" / end)


def kill(running: Running, draw: random.Random, workers: list[psutil.Process], *, lines: int | None = None) -> bool:
    """Kill the ranks a moment after one has printed some lines; return whether they had not ended before.

    Args:
        workers: receives the ranks' own children, which outlive them.
        lines: how many; by default a random number.
    """
    lines, pause_s = draw.randrange(4) if lines is None else lines, draw.uniform(0.0, LONGEST_PAUSE_S)
    sentinels: Any = [process.sentinel for process in running.processes]
    while not wait(sentinels, 0.005):
        texts = [output.read_text() for output in running.outputs if output.exists()]
        if len(texts) == len(running.outputs) and any(len(figures(text)) >= lines for text in texts):
            break
    if wait(sentinels, pause_s):
        return False
    for rank in range(len(running.processes)):
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            workers += psutil.Process(running.processes[rank].pid).children(recursive=True)
            running.send(rank, signal.SIGKILL)
    return True
