"""The results of the tests on a device, each recorded at once: a process that is killed has recorded the earlier ones.

A line of JSON is a list of tests to come, a test that begins, its result, or a finding that no test asserts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

RECORDS = "CUDA_TEST_RECORDS"  # in the environment: the file that takes the lines
FOUND: dict[str, str] = {}


def record(name: str, value: str) -> None:
    """Keep a finding."""
    FOUND[name] = value
    append({"finding": name, "value": value})


def append(line: Mapping[str, object]) -> None:
    """Add a line to the file of results, if there is one."""
    path = os.environ.get(RECORDS)
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
