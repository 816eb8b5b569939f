"""A small state, saved by several ranks in turn with torch's DCP: `python -m scripts.bench.small_states`.

Every save goes into a new folder. The figures are the seconds of the slowest rank from the call to its return: medians,
and the median of the ratio of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from reprise import load_state_dict, save_state_dict
from scripts.faults import ranks
from trainer.commands.arguments import existing_folder

_TIMEOUT_S = 600.0
_WARM_UP = 2  # rounds that are not counted: imports, connections, the first plan
_TENSORS, _ELEMENTS = 4, 16

Call = Callable[[Path, dict[str, Any], int], object]
_SAVES: dict[str, Call] = {
    "save_state_dict": lambda folder, state, number: save_state_dict(folder, state, iteration=number),
    "DCP save": lambda folder, state, _: state_dict_saver.save(state, checkpoint_id=folder),
}
_LOADS: dict[str, Call] = {
    "load_state_dict": lambda folder, state, _: load_state_dict(folder, state),
    "DCP load": lambda folder, state, _: state_dict_loader.load(state, checkpoint_id=folder),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the ranks, and print a line for each call."""
    parser = argparse.ArgumentParser(prog="small_states", description=__doc__)
    parser.add_argument("--folder", type=existing_folder, default=Path(), help="parent of a temporary folder")
    parser.add_argument("--ranks", type=int, default=4, help="ranks that save together (%(default)d)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds in which the calls take turns (%(default)d)")
    options = parser.parse_args(arguments)
    if "RANK" in os.environ:
        _run_rank(options.folder, options.rounds)
        return
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=options.folder)).absolute()
    command = [sys.executable, "-m", "scripts.bench.small_states", "--folder", str(folder)]
    try:
        ranks.run_ranks([*command, "--rounds", str(options.rounds)], options.ranks, timeout_s=_TIMEOUT_S)
        rounds = json.loads((folder / "rounds.json").read_text())
    finally:
        shutil.rmtree(folder)
    print("\n".join(summary(rounds)))


def summary(rounds: Sequence[dict[str, float]]) -> list[str]:
    """Return a line for each call: its median, and that of its ratio to DCP's in the same round."""
    lines = []
    for calls in (_SAVES, _LOADS):
        unit = list(calls)[-1]
        for name in calls:
            median_ms = 1000 * statistics.median(row[name] for row in rounds)
            ratio = statistics.median(row[name] / row[unit] for row in rounds)
            lines.append(f"{name:16} {median_ms:7.1f} ms  {ratio:5.2f} of {unit}")
    return [f"{len(rounds)} rounds.", *lines]


def _run_rank(folder: Path, rounds: int) -> None:
    """Make all calls in turn; rank 0 writes the seconds of the slowest rank."""
    dist.init_process_group("gloo")
    rows = [_round(folder / f"round-{number}", number) for number in range(rounds + _WARM_UP)]
    if dist.get_rank() == 0:
        (folder / "rounds.json").write_text(json.dumps(rows[_WARM_UP:]))
    dist.destroy_process_group()


def _round(folder: Path, number: int) -> dict[str, float]:
    state = {f"tensor{index}": torch.full((_ELEMENTS,), float(index)) for index in range(_TENSORS)}
    seconds: dict[str, float] = {}
    for calls in (_SAVES, _LOADS):
        order = list(calls.items())
        for index, (name, call) in enumerate(order if number % 2 else reversed(order)):
            place = folder / str(index if number % 2 else len(order) - 1 - index)
            if dist.get_rank() == 0:
                place.mkdir(parents=True, exist_ok=True)
                os.sync()
            dist.barrier()
            start = time.perf_counter()
            call(place, state, number)
            seconds[name] = _slowest(time.perf_counter() - start)
    return seconds


def _slowest(seconds: float) -> float:
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


if __name__ == "__main__":
    main()
