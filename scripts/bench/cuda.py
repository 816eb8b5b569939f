"""The battery of speed on a device: training, saves and loads, each beside other ways in the same run.

Every side is measured in a process of its own, one after the other, with the time that the battery has left. The tables
are printed at the end, and everything is written as JSON to the folder in the environment variable OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import safetensors.torch
import torch

from reprise.errors import LaunchError
from scripts.bench import machine
from scripts.bench.harness import Figures, Goal, Row, Side, apart, report, seconds_of, take_turns
from scripts.bench.probe import device_peak, peak_memory, synchronize
from scripts.bench.subject import Subject, build_subject, config_of
from scripts.bench.train import NANOGPT, OURS, STEP, THEIRS, build_side
from scripts.bench.ways import BACKGROUND, PROCESS, THREAD, WAYS, Way
from trainer.config.schema import Config
from trainer.launch import process_group as launch
from trainer.launch.device import CPU, choose_device

COPY, LOAD, LOAD_FILE = "pinned copy", "ours, load", "safetensors load_file"
STALL, COST, SECONDS = "stall, s", "cost, s", "load, s"
_MOST_S = 180.0  # of a call of a side
_FOLLOWING = 10  # iterations after a save whose time counts
STEP_GOAL = Goal("step over nanoGPT's way", OURS, STEP, NANOGPT, 1.0)
SAVE_GOALS = (
    Goal("stall of a save over one pinned copy", BACKGROUND, STALL, COPY, 1.1),
    *(Goal(f"cost of a save over {name}", BACKGROUND, COST, name, 0.5) for name in (THREAD, PROCESS)),
    Goal("load over safetensors' load_file", LOAD, SECONDS, LOAD_FILE, 1.2),
)


@dataclass(frozen=True, slots=True)
class Group:
    """Sides that are compared.

    Args:
        model: the overrides of the full size; a tiny model of the family stands for it in tests.
        samples: of an iteration.
        steps: of a round; 0 for saves and loads.
        goals: of the ratios; a group without is measured only where it is named.
    """

    model: tuple[str, ...]
    samples: int
    steps: int
    sides: tuple[str, ...]
    goals: tuple[Goal, ...] = ()


_TO_NANOGPT, _TO_THEIRS = (OURS, NANOGPT), (OURS, THEIRS)
_SAVES = (
    COPY,
    BACKGROUND,
    LOAD,
    LOAD_FILE,
    THREAD,
    PROCESS,
)  # in this order: the files of our save are those that are loaded
# A clock that runs out leaves out the last groups.
GROUPS: Mapping[str, Group] = {
    "step_gpt2_124m": Group(("gpt2_124m",), 16, 20, _TO_NANOGPT, (STEP_GOAL,)),
    "save_gpt2_1558m": Group(("gpt2_1558m",), 4, 0, _SAVES, SAVE_GOALS),
    "step_gpt2_1558m": Group(("gpt2_1558m",), 8, 3, _TO_NANOGPT, (STEP_GOAL,)),
    "step_llama3_1b": Group(("llama3_1b",), 4, 5, _TO_THEIRS),
    "transformers_gpt2_124m": Group(("gpt2_124m",), 16, 20, _TO_THEIRS),
    "transformers_gpt2_1558m": Group(("gpt2_1558m",), 8, 3, _TO_THEIRS),
    "step_llama3_8b": Group(("llama3_8b", "model.n_layer=8"), 2, 3, _TO_THEIRS),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subject."""
    parser.add_argument("--device", default="cuda", help="as train.device (%(default)s)")
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny runs the same code in seconds")
    parser.add_argument("--seconds", type=float, default=480.0, help="of the whole battery (%(default)g)")
    with_goals = [name for name, group in GROUPS.items() if group.goals]
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=with_goals, help="(%(default)s)")


def measure(options: argparse.Namespace, folder: Path) -> list[str]:
    """Measure the groups, and return their tables.

    Raises:
        SystemExit: without such a device.
    """
    try:
        device = choose_device(options.device, 0)
    except LaunchError as error:
        raise SystemExit(f"bench cuda: {error}") from error
    start, is_tiny = time.monotonic(), options.size == "tiny"
    eager = "torch.compile is left out" if is_tiny else machine.compile_error(device)
    about, tables = [*machine.describe_device(device), *filter(None, [eager])], dict[str, list[Row]]()
    for name in options.only:
        group, rows = GROUPS[name], tables.setdefault(name, [])
        config = _config(group, is_tiny=is_tiny, compiles=not eager)
        build = build_side if group.steps else build_save
        rounds, warm_up = (5, 1) if group.steps else (1, 0)
        for side in group.sides:
            left_s = max(0.0, start + options.seconds - time.monotonic())
            print(f"{time.strftime('%H:%M:%S')} {name}, {side}, {left_s:.0f} s are left", file=sys.stderr, flush=True)
            words = (side, config, options.device, int(is_tiny), group.steps or folder)
            with apart(build, *words, timeout_s=min(left_s, _MOST_S)) as call:
                rows += take_turns({side: call}, rounds, warm_up=warm_up)
            # Every time: a machine may be taken back.
            _write({"machine": [*machine.describe(folder), *about], "size": options.size, "groups": tables})
    lines = [f"- {line}" for line in about]
    for name, rows in tables.items():
        lines += ["", f"{name}:", "", *report(rows, COPY, GROUPS[name].goals)]
    return lines


def _config(group: Group, *, is_tiny: bool, compiles: bool) -> Config:
    train = ("train.dtype=bfloat16", f"train.compile={str(compiles).lower()}")
    if is_tiny:
        return config_of(f"{group.model[0].partition('_')[0]}_tiny", *train, samples=2, seq_length=16)
    return config_of(*group.model, *train, samples=group.samples, seq_length=1024)


def _write(document: Mapping[str, object]) -> None:
    out = os.environ.get("OUT")
    if out:
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / "bench-cuda.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def build_save(side: str, config: Config, device: str, threads: int, folder: Path) -> Side:
    """Return the measurement of a side of saves and loads, in a process of its own."""
    cluster = launch.start(device, deterministic=False, threads=threads, variables={})
    subject, saves = build_subject(config, cluster), folder / BACKGROUND
    calls: Mapping[str, Side] = {
        COPY: partial(_copy, subject),
        LOAD: partial(_load, subject, partial(WAYS[BACKGROUND].load, subject, saves, 2)),
        LOAD_FILE: partial(_load, subject, partial(_load_file, saves, str(cluster.device))),
    }
    return calls[side] if side in calls else partial(_cost, subject, WAYS[side], folder / side)


def _seconds(subject: Subject, call: Callable[[], object]) -> float:
    """Return the seconds of a call and of its work on the device."""
    device = subject.cluster.device

    def work() -> None:
        call()
        synchronize(device)

    synchronize(device)
    return seconds_of(work)


def _copy(subject: Subject) -> Figures:
    """Copy the whole state into pinned memory."""
    sources = [*subject.named().values()]
    is_pinned = subject.cluster.device.type != CPU
    targets = [torch.empty(s.shape, dtype=s.dtype, pin_memory=is_pinned) for s in sources]

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)

    return {STALL: median(_seconds(subject, copy) for _ in range(3)), "state, GB": subject.own_bytes / 1e9}


def _cost(subject: Subject, way: Way, folder: Path) -> Figures:
    """Measure two saves, of which the first allocates what the second uses, with the iterations that follow.

    The stall is the call and the first iteration after it, less a quiet iteration; the cost is that of all that follow.
    """
    device, iterate, figures = subject.cluster.device, subject.iteration(), Figures()
    quiet_s = median([_seconds(subject, iterate) for _ in range(8)][3:])
    with way.opened(subject, folder) as begin:
        for number in (1, 2):
            figures["first stall, s"] = figures.get(STALL, 0.0)
            grown, peak = peak_memory(), device_peak(device)
            synchronize(device)
            start = time.perf_counter()
            begun = begin(number)
            with subject.hooked(begun.hold):
                iterate()
                synchronize(device)
                first_s = time.perf_counter() - start
                for _ in range(_FOLLOWING - 1):
                    iterate()
                synchronize(device)
            total_s = time.perf_counter() - start
            begun.settle()
            figures |= {
                STALL: first_s - quiet_s,
                COST: total_s - _FOLLOWING * quiet_s,
                "durable, s": time.perf_counter() - start,
                STEP: quiet_s * 1e3,
                **grown(),
                **peak(),
            }
    return figures


def _load(subject: Subject, call: Callable[[], object]) -> Figures:
    """Load from the page cache; the least of some times."""
    return {SECONDS: min(_seconds(subject, call) for _ in range(3))}


def _load_file(folder: Path, device: str) -> None:
    """Load our files with safetensors alone, which checks no digest and makes new tensors."""
    for path in sorted((folder / "iter_0000002").rglob("*.safetensors")):
        safetensors.torch.load_file(path, device=device)
