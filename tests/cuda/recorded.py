"""What the tests on a device find and do not assert: printed at their end, and written to the folder $OUT."""

from __future__ import annotations

import json
import os
from pathlib import Path

FOUND: dict[str, str] = {}


def record(name: str, value: str) -> None:
    """Keep a finding."""
    FOUND[name] = value


def write() -> list[str]:
    """Write the findings to `$OUT/test-cuda.json`, if there is such a folder, and return them as lines."""
    folder = os.environ.get("OUT")
    if FOUND and folder:
        (Path(folder) / "test-cuda.json").write_text(json.dumps(FOUND, indent=2) + "\n", encoding="utf-8")
    return [f"{name}: {value}" for name, value in FOUND.items()]
