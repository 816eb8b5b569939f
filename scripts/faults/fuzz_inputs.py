"""Fuzz all parsers of untrusted files, guided by coverage:

    python -m scripts.faults.fuzz_inputs --seconds 300

Each file of a checkpoint and a token file has its share of the time and its own process. With `atheris`
(https://github.com/google/atheris) installed, libFuzzer chooses the changes. Without it a built-in loop does, which
keeps every input that takes a new branch of the program. A finding is any exception but a
`TrainerError`, a file opened outside the folder, or an input that takes longer than five seconds. It is written
to the folder of findings, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from scripts.faults.fuzz.mutate import mutate

TARGETS = ("manifest", "state", "trainer_state", "index", "header", "optimizer_header", "tokens")
_SECONDS_OF_ONE = 5
_Attempt = Callable[[bytes], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the fuzzer, print a line for each target and return the exit status."""
    parser = argparse.ArgumentParser(prog="fuzz_inputs", description="Fuzz what is read from files of strangers.")
    parser.add_argument("--seconds", type=float, default=60.0, help="of all targets together")
    parser.add_argument("--engine", choices=("atheris", "own"), help="by default atheris, where it is installed")
    parser.add_argument("--target", choices=TARGETS, help="this one only")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--findings", type=Path, default=Path("runs/fuzz"), help="folder of inputs that break something"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    engine = options.engine or ("atheris" if importlib.util.find_spec("atheris") else "own")
    if engine == "atheris" and importlib.util.find_spec("atheris") is None:
        parser.error("atheris is not installed: pip install atheris, or leave --engine=atheris out")
    if options.inside:
        return _ENGINES[engine](options)
    targets = [options.target] if options.target else list(TARGETS)
    total, failed = 0, False
    for target in targets:
        line = _in_a_process(options, engine, target, options.seconds / len(targets))
        print(f"fuzz_inputs: {engine}, {target}: {line['text']}", flush=True)
        total, failed = total + int(line["executions"]), failed or bool(line["failed"])
    print(f"fuzz_inputs: {engine}, {total} executions: {'see the findings' if failed else 'no findings'}", flush=True)
    return 1 if failed else 0


def _in_a_process(options: argparse.Namespace, engine: str, target: str, seconds: float) -> dict[str, Any]:
    """Run a target and return its result; libFuzzer ends its process itself."""
    command = [sys.executable, "-m", "scripts.faults.fuzz_inputs", "--inside", "--engine", engine, "--target", target]
    command += ["--seconds", str(seconds), "--seed", str(options.seed), "--findings", str(options.findings)]
    process = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    output = process.stdout + process.stderr
    executions = re.findall(r"stat::number_of_executed_units:\s+(\d+)", output) or ["0"]
    edges = re.findall(r"cov: (\d+)", output) or ["0"]
    text = f"{executions[-1]} executions, {edges[-1]} edges, {seconds:.0f} s, "
    text += "no finding" if process.returncode == 0 else f"exit status {process.returncode}\n{output[-3000:]}"
    return {"text": text, "executions": executions[-1], "failed": process.returncode != 0}


@contextlib.contextmanager
def _attempts(options: argparse.Namespace) -> Iterator[tuple[_Attempt, bytes]]:
    """Yield a function that tries an input, and a valid input; a finding is written to a file and raised."""
    from scripts.faults.fuzz.targets import Inputs, Opened  # after the engine has seen to it that coverage is counted

    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        inputs, paths = Inputs(Path(name)), Opened(Path(name))
        good = inputs.seeds[options.target]
        if not inputs.attempt(options.target, good):
            raise RuntimeError(f"the good {options.target} is refused")

        def attempt(data: bytes) -> None:
            signal.alarm(_SECONDS_OF_ONE)
            paths.outside.clear()
            paths.watching, is_good = True, False
            try:
                inputs.attempt(options.target, data)
                is_good = not paths.outside
            finally:
                paths.watching = False
                signal.alarm(0)
                if not is_good:
                    options.findings.mkdir(parents=True, exist_ok=True)
                    (options.findings / f"{options.target}-{zlib.crc32(data):08x}").write_bytes(data)
            if paths.outside:
                raise RuntimeError(f"opened outside of the folder: {paths.outside}")

        yield attempt, good


def _late(*_: object) -> None:
    raise TimeoutError(f"an input took more than {_SECONDS_OF_ONE} s")


def _fuzz_with_atheris(options: argparse.Namespace) -> int:
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(
        include=[
            "reprise",
            "trainer.data",
            "trainer.record.resume_rules",
            "trainer.record.run_record",
            "trainer.schedules.progress",
        ]
    ):
        importlib.import_module("scripts.faults.fuzz.targets")
    with _attempts(options) as (attempt, good), tempfile.TemporaryDirectory() as corpus:
        Path(corpus, "good").write_bytes(good)

        def change(data: bytes, most_bytes: int, seed: int) -> bytes:
            chance = random.Random(seed)
            if chance.random() < 0.3:
                return bytes(atheris.Mutate(data, most_bytes))
            return mutate(bytes(data), chance)[:most_bytes]

        limits = [f"-max_total_time={int(options.seconds)}", "-max_len=65536", "-rss_limit_mb=4096"]
        flags = [*limits, f"-seed={options.seed}", "-print_final_stats=1", "-handle_alrm=0"]
        atheris.Setup(["fuzz_inputs", *flags, f"-artifact_prefix={corpus}/", corpus], attempt, custom_mutator=change)
        signal.signal(signal.SIGALRM, _late)
        atheris.Fuzz()
    return 0


def _fuzz_with_our_own(options: argparse.Namespace) -> int:
    """Keep each input that takes a new edge, from line to line of a function."""
    signal.signal(signal.SIGALRM, _late)
    chance, seen, executions = random.Random(options.seed), set[tuple[object, int, int]](), 0
    with _attempts(options) as (attempt, good):
        corpus, end = [good], time.monotonic() + options.seconds
        while time.monotonic() < end:
            data = mutate(chance.choice(corpus), chance) if executions else good
            edges = _edges_of(attempt, data)
            if not edges <= seen:
                seen |= edges
                corpus.append(data)
            executions += 1
    print(f"stat::number_of_executed_units: {executions}\ncov: {len(seen)}")
    return 0


def _edges_of(attempt: _Attempt, data: bytes) -> set[tuple[object, int, int]]:
    """Return the edges that an input takes in our own modules, as the function and two of its lines."""
    edges = set[tuple[object, int, int]]()
    last: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if event == "call" and not _is_ours(frame):
            return None
        line = frame.f_lineno
        edges.add((frame.f_code, last.get(frame, 0), line))
        last[frame] = line
        return trace

    sys.settrace(trace)
    try:
        attempt(data)
    finally:
        sys.settrace(None)
    return edges


def _is_ours(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return str(name).startswith(
        (
            "reprise",
            "trainer.data",
            "trainer.record.resume_rules",
            "trainer.record.run_record",
            "trainer.schedules.progress",
        )
    )


_ENGINES = {"atheris": _fuzz_with_atheris, "own": _fuzz_with_our_own}

if __name__ == "__main__":
    sys.exit(main())
