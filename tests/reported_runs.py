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
    start = {"launch": "steady", "start": {"seconds": 2.0}}
    records = [line(n, loss, 2.0 + n, **(start if n == 1 else {})) for n, loss in enumerate(losses, start=1)]
    write(folder / "metrics.jsonl", records)
    begin = {"event": "begin", "launch": "steady", "iteration": 0, "began": BEGAN, "time": BEGAN + 1}
    write(folder / "launches.jsonl", [begin])
    return folder


def twice_killed_run(folder: Path) -> Path:
    """Write the folder of a run of 500 iterations, a save at every 100th, that was killed after 260 and 340."""
    launches = [(0, 260, 200), (200, 340, 300), (300, 500, 500)]  # from, to, and what the next one goes on from
    log, branches, records = list[dict[str, object]](), list[list[dict[str, object]]](), list[dict[str, object]]()
    time = 0.0
    for number, (first, last, saved) in enumerate(launches):
        name, lost = f"launch{number}", list[dict[str, object]]()
        ranks = 2 if number == 1 else 1
        begin = {"event": "begin", "launch": name, "iteration": first, "began": BEGAN + time}
        config = {"train": {"micro_batch_size": 8 // ranks}}
        records.append(
            {**begin, "topology": {"world_size": ranks, "dp": ranks}, "config": config, "time": BEGAN + time + 20}
        )
        time += 30.0
        for n in range(first + 1, last + 1):
            time += 2.0
            start = {"launch": name, "start": {"seconds": 30.0}} if n == first + 1 else {}
            target = log if n <= saved else lost
            loss = 5 / math.sqrt(n) + 0.05 * math.sin(n) + (1.5 if n == 420 else 0)
            target.append(line(n, loss, time, seconds=2.0, **start))
            if n % 100 == 0:
                time += 10.0
                target.append(event("evaluation", n, time, valid_loss=5 / math.sqrt(n)))
                figures = {
                    "seconds": 8.0,
                    "blocked_seconds": 0.5,
                    "waited_seconds": 0.0,
                    "written_bytes": 2_000_000_000,
                }
                target.append(event("save", n, time + 1, **figures))
        if last > saved:
            branches.append(lost)
            time += 120.0
    records.append(
        {"event": "end", "launch": "launch2", "iteration": 500, "outcome": "finished", "time": BEGAN + time + 5}
    )
    write(folder / "metrics.jsonl", log)
    write(folder / "launches.jsonl", records)
    for number, lost in enumerate(branches, start=1):
        write(folder / f"metrics.abandoned-{number}.jsonl", lost)
    return folder
