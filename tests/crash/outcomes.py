"""What a run has left, and how it is held to the run that met no trouble."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reprise.storage import iteration_name
from tests.harness import checkpoint, curve, tensor_files


def saved(run: Path, folder: str = "checkpoints") -> list[int]:
    """Return the iterations that a run has saved; nothing else may lie in the folder but files and what is hidden."""
    names = sorted(path.name for path in (run / folder).glob("[!.]*") if path.is_dir())
    iterations = [int(name[-7:]) if name[-7:].isdigit() else -1 for name in names]
    assert names == [iteration_name(iteration) for iteration in iterations], names
    return iterations


def rows(run: Path, *events: str | None, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return the records of these events; an iteration has none."""
    records = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [row for row in records if row.get("event") in events]


def assert_ends_as(run: Path, whole: Path) -> None:
    """Hold a run to the whole one: the bits of its curve, and of its last checkpoint."""
    assert curve(run) == curve(whole)
    last = saved(whole)[-1]
    assert tensor_files(checkpoint(run, last)) == tensor_files(checkpoint(whole, last))
