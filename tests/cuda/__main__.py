"""The tests on a CUDA device in one table: `python -m tests.cuda`, or `make test-cuda`.

The files run side by side, each in a process of its own, and within one time: a test that hangs is killed, with its
file, and the results of all others are shown. They are written as JSON to the folder that the environment variable OUT
names, and the output of each file beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.bench import machine
from scripts.bench.harness import table
from tests.cuda.limits import SECONDS
from tests.cuda.recorded import RECORDS

HERE = Path(__file__).resolve().parent
# Its tests compare the times of copies and of steps, so nothing runs beside it.
ALONE = HERE / "test_saves.py"
_ALONE_S = 150.0
_GRACE_S = 30.0  # in which the last tests end, and are killed after it
_ENDED = (0, 5)  # exit statuses of pytest: all passed, or none was collected


@dataclass(frozen=True, slots=True)
class Part:
    """A file of tests that is running."""

    file: Path
    process: subprocess.Popen[bytes]
    records: Path
    log: Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests, print the table, write the JSON and return 0; 1 if a test failed or did not end."""
    options = _parser().parse_args(arguments)
    start = time.monotonic()
    end = start + options.seconds
    alone = [file for file in options.files if file.resolve() == ALONE]
    rest = [file for file in options.files if file.resolve() != ALONE]
    with tempfile.TemporaryDirectory(prefix="test-cuda-") as folder:
        parts: list[tuple[Part, str]] = []
        for files, last in ((alone, min(end, start + _ALONE_S)), (rest, end)):
            parts += _run(files, Path(folder), options.marker, last)
        tests = [row for part, failure in parts for row in results(part.file.name, part.records, failure)]
        found = {
            "machine": [*_device_lines(), *machine.describe(Path(folder))],
            "seconds": round(time.monotonic() - start, 1),
            "tests": tests,
            "findings": {line["finding"]: line["value"] for part, _ in parts for line in _lines(part.records, "value")},
        }
        for part, failure in parts:
            if failure or any(row["result"] == "failed" for row in tests if row["file"] == part.file.name):
                print(f"==== {part.file.name} {failure}\n{part.log.read_text(errors='replace')}")
        print("\n".join(lines(found)))
        _write(found, [part.log for part, _ in parts])
    return int(any(row["result"] == "failed" for row in tests) or any(failure for _, failure in parts))


def _run(files: Sequence[Path], folder: Path, marker: str, end: float) -> list[tuple[Part, str]]:
    """Run files side by side until the end; return each with how it failed as a whole, or nothing."""
    parts = [_start(file, folder, marker, end - time.monotonic() - _GRACE_S) for file in files]
    found = []
    try:
        for part in parts:
            failure = ""
            try:
                status = part.process.wait(max(0.0, end - time.monotonic()))
                if status not in (*_ENDED, 1):  # 1: tests failed, and their rows show it
                    failure = f"pytest ended with status {status}"
            except subprocess.TimeoutExpired:
                failure = "killed when the time was over"
            found.append((part, failure))
    finally:
        for part in parts:
            with suppress(ProcessLookupError):
                os.killpg(part.process.pid, signal.SIGKILL)
            part.process.wait()
    return found


def _start(file: Path, folder: Path, marker: str, seconds: float) -> Part:
    records, log = folder / f"{file.stem}.jsonl", folder / f"{file.stem}.log"
    command = [sys.executable, "-m", "pytest", "-m", marker, str(file), f"--basetemp={folder / file.stem}", "-rs"]
    variables = {**os.environ, RECORDS: str(records), SECONDS: f"{max(0.0, seconds):.0f}"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )
    return Part(file, process, records, log)


def results(file: str, records: Path, failure: str) -> list[dict[str, Any]]:
    """Return a row for every test that a file collected, in that order, and one more if it collected nothing.

    Args:
        failure: how the file failed as a whole; the test that was under way then has failed.
    """
    collected = [name for line in _lines(records, "collected") for name in line["collected"]]
    begun = {line["begun"] for line in _lines(records, "begun")}
    ends: dict[str, Mapping[str, Any]] = {}
    for line in _lines(records, "test"):
        if ends.get(line["test"], {}).get("result") != "failed":  # a fixture may fail after its test has passed
            ends[line["test"]] = line
    rows = []
    for name in collected:
        row = {"file": file, "test": name.rpartition("::")[2]}
        if name in ends:
            rows.append(row | {key: ends[name][key] for key in ("result", "seconds", "reason")})
        elif name in begun:
            rows.append(row | {"result": "failed", "seconds": 0.0, "reason": f"did not end: {failure}"})
        else:
            rows.append(row | {"result": "skipped", "seconds": 0.0, "reason": f"left out: {failure}"})
    if failure and not collected:
        rows.append({"file": file, "test": "all", "result": "failed", "seconds": 0.0, "reason": failure})
    return rows


def _lines(records: Path, key: str) -> list[dict[str, Any]]:
    """Return the lines of a file of results that have a key; the last line may be cut off."""
    found = []
    with suppress(FileNotFoundError, json.JSONDecodeError):
        for line in records.read_text(encoding="utf-8").splitlines():
            found.append(json.loads(line))
    return [line for line in found if key in line]


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return the machine, the table, the findings and the sum as lines of Markdown."""
    rows = [
        (row["file"].removesuffix(".py"), row["test"], row["result"], f"{row['seconds']:.1f}", row["reason"][:120])
        for row in found["tests"]
    ]
    counts = [
        f"{number} {result}"
        for result in ("passed", "failed", "skipped")
        if (number := sum(row["result"] == result for row in found["tests"]))
    ]
    return [
        *(f"- {line}" for line in found["machine"]),
        "",
        *table(("file", "test", "result", "s", "reason"), rows),
        "",
        *(f"- {name}: {value}" for name, value in found["findings"].items()),
        f"- {', '.join(counts)} in {found['seconds']:.0f} s",
    ]


def _write(found: Mapping[str, Any], logs: Sequence[Path]) -> None:
    out = os.environ.get("OUT")
    if not out:
        return
    Path(out).mkdir(parents=True, exist_ok=True)
    (Path(out) / "test-cuda.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for log in logs:
        shutil.copyfile(log, Path(out) / f"test-cuda.{log.name}")


def _device_lines() -> list[str]:
    return machine.describe_device(torch.device("cuda", 0)) if torch.cuda.is_available() else []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tests.cuda", description=__doc__)
    parser.add_argument("--seconds", type=float, default=480.0, help="of all tests (%(default)g)")
    parser.add_argument("--marker", default="cuda", help="the tests that pytest chooses (%(default)s)")
    files = sorted(HERE.glob("test_*.py"))
    parser.add_argument("files", nargs="*", type=Path, default=files, metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
