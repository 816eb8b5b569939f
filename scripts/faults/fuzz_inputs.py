"""Fuzz all parsers of untrusted files, guided by coverage:

    python -m scripts.faults.fuzz_inputs --seconds 300

Each file of a checkpoint and a token file has its share of the time. Every input that takes a new branch of the program
is kept and changed further. A finding is any exception but a `TrainerError`, a file opened outside the folder, or an
input that takes longer than five seconds. It is written to the folder of findings, and ends the program.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from scripts.faults.fuzz.mutate import mutate
from scripts.faults.fuzz.targets import Inputs, Opened

TARGETS = ("manifest", "state", "trainer_state", "index", "header", "optimizer_header", "tokens")
_SECONDS_OF_ONE = 5
_TRACED = 8  # of so many inputs one is followed through the program, which takes as long as the others together
_OURS = (
    "reprise",
    "trainer.data",
    "trainer.record.resume_rules",
    "trainer.record.run_record",
    "trainer.schedules.progress",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz, print a line for each target and return 0; a finding is raised."""
    parser = argparse.ArgumentParser(prog="fuzz_inputs", description="Fuzz what is read from files of strangers.")
    parser.add_argument("--seconds", type=float, default=60.0, help="of all targets together")
    parser.add_argument("--target", choices=TARGETS, help="this one only")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--findings", type=Path, default=Path("runs/fuzz"), help="folder of inputs that break something"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGALRM, _late)
    targets = [options.target] if options.target else list(TARGETS)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        fuzzer = Fuzzer(Path(name).resolve(), options.findings, random.Random(options.seed))
        for target in targets:
            executions, edges = fuzzer.run(target, options.seconds / len(targets))
            print(f"fuzz_inputs: {target}: {executions} executions, {edges} edges, no finding", flush=True)
    return 0


class Fuzzer:
    """Tries inputs in a folder, and writes those that break something to the folder of findings."""

    def __init__(self, folder: Path, findings: Path, chance: random.Random) -> None:
        self._inputs, self._paths = Inputs(folder), Opened(folder)
        self._findings, self._chance = findings, chance

    def run(self, target: str, seconds: float) -> tuple[int, int]:
        """Fuzz a target, and return the numbers of executions and of edges, from line to line of a function."""
        good = self._inputs.seeds[target]
        if not self._inputs.attempt(target, good):
            raise RuntimeError(f"the good {target} is refused")
        corpus, seen, executions, end = [good], set[tuple[object, int, int]](), 0, time.monotonic() + seconds
        while time.monotonic() < end:
            data = mutate(self._chance.choice(corpus), self._chance) if executions else good
            if executions % _TRACED:
                self._attempt(target, data)
            elif not (edges := self._edges_of(target, data)) <= seen:
                seen |= edges
                corpus.append(data)
            executions += 1
        return executions, len(seen)

    def _edges_of(self, target: str, data: bytes) -> set[tuple[object, int, int]]:
        """Return the edges that an input takes in our own modules, as the function and two of its lines."""
        edges, last = set[tuple[object, int, int]](), dict[FrameType, int]()

        def trace(frame: FrameType, event: str, _: object) -> Any:
            if event == "call" and not str(frame.f_globals.get("__name__", "")).startswith(_OURS):
                return None
            edges.add((frame.f_code, last.get(frame, 0), frame.f_lineno))
            last[frame] = frame.f_lineno
            return trace

        sys.settrace(trace)
        try:
            self._attempt(target, data)
        finally:
            sys.settrace(None)
        return edges

    def _attempt(self, target: str, data: bytes) -> None:
        signal.alarm(_SECONDS_OF_ONE)
        self._paths.outside.clear()
        self._paths.watching, is_good = True, False
        try:
            self._inputs.attempt(target, data)
            is_good = not self._paths.outside
        finally:
            self._paths.watching = False
            signal.alarm(0)
            if not is_good:
                self._findings.mkdir(parents=True, exist_ok=True)
                (self._findings / f"{target}-{zlib.crc32(data):08x}").write_bytes(data)
        if self._paths.outside:
            raise RuntimeError(f"opened outside of the folder: {self._paths.outside}")


def _late(*_: object) -> None:
    raise TimeoutError(f"an input took more than {_SECONDS_OF_ONE} s")


if __name__ == "__main__":
    sys.exit(main())
