"""Folders of runs for the tests of `reprise report`, with times that a test chooses."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

BEGAN = 1_800_000_000.0
SAMPLES, LENGTH = 8, 64


def line(iteration: int, loss: float, time: float, *, seconds: float = 1.0, **members: object) -> dict[str, object]:
    """Return the record of an iteration which ends `time` seconds after the first start."""
    return {
        "iteration": iteration,
        "loss": loss if math.isfinite(loss) else None,
        "loss_hex": loss.hex(),
        "grad_norm": 1.0,
        "grad_norm_hex": (1.0).hex(),
        "lr": 1e-3,
        "lr_hex": (1e-3).hex(),
        "consumed_samples": SAMPLES * iteration,
        "tokens_per_second": round(SAMPLES * LENGTH / seconds, 1),
        "seconds": seconds,
        "checkpoint_seconds": 0.0,
        **members,
        "time": BEGAN + time,
    }


def event(name: str, iteration: int, time: float, **members: object) -> dict[str, object]:
    """Return the record of an event."""
    return {"iteration": iteration, "event": name, **members, "time": BEGAN + time}


def write(path: Path, records: Sequence[Mapping[str, object]]) -> None:
    """Write records as a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def steady_run(folder: Path, losses: Sequence[float]) -> Path:
    """Write the folder of a run of one launch with a loss for each second, and return it."""
    start = {"start": {"seconds": 2.0}, "versions": {"python": "3.11"}}
    records = [line(n, loss, 2.0 + n, **(start if n == 1 else {})) for n, loss in enumerate(losses, start=1)]
    write(folder / "metrics.jsonl", records)
    return folder
