"""The battery of speed on a device: training, saves and loads, each beside other ways in the same run.

Every group is measured in a process of its own, so that its memory is its own, with the time that the battery has left.
A table for each is printed at the end, and everything is written as JSON to the folder in the environment variable OUT.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import safetensors.torch
import torch
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from models import families
from models.config import Family
from reprise.errors import LaunchError
from scripts.bench import machine
from scripts.bench.harness import LEFT_OUT, BenchSide, Figures, Goal, Row, append, read, report, seconds_of, take_turns
from scripts.bench.probe import peak_memory
from scripts.bench.subject import Subject, build_subject, config_of
from scripts.bench.train import OURS, RATE, THEIRS, Step, nanogpt_step, our_step, synchronize, their_step, time_steps
from scripts.bench.ways import PROCESS, THREAD, Begin, load_ours, opened_checkpointer, opened_dcp
from trainer.config.schema import Config
from trainer.launch import process_group as launch
from trainer.launch.device import choose_device, device_name
from trainer.launch.process_group import Cluster
from trainer.metrics.run_log import peak_flops

NANOGPT, COPY, LOAD, LOAD_FILE = "nanoGPT's way", "pinned copy", "reprise, load", "safetensors load_file"
STALL, COST, SECONDS = "stall, s", "cost, s", "load, s"
_GRACE_S = 20.0  # in which a group ends after its time
_FOLLOWING = 10  # iterations after a save whose time counts
STEP_GOAL = Goal("speed over nanoGPT's way", OURS, RATE, [NANOGPT], 1.0, is_least=True)
SAVE_GOALS = (
    Goal("stall of a save over one pinned copy", OURS, STALL, [COPY], 1.1),
    Goal("cost of a save to training over DCP's best", OURS, COST, [THREAD, PROCESS], 0.5),
    Goal("load over safetensors' load_file", LOAD, SECONDS, [LOAD_FILE], 1.2),
)


@dataclass(frozen=True, slots=True)
class Group:
    """Sides measured in a single process.

    Args:
        model: the overrides of the full size; a tiny model of the family stands for it in tests.
        least_s: the least seconds with which it is begun; it may take `most_s`.
        sides: the measured sides; empty for those of a save.
        goals: of the ratios; a group without is one of the `others`.
    """

    model: tuple[str, ...]
    samples: int
    steps: int
    least_s: float
    most_s: float
    sides: tuple[str, ...] = ()
    goals: tuple[Goal, ...] = ()


_TO_NANOGPT, _TO_THEIRS = (OURS, NANOGPT), (OURS, THEIRS)
# The groups that have goals come first; a clock that runs out leaves out the last groups.
GROUPS: Mapping[str, Group] = {
    "step gpt2_124m": Group(("gpt2_124m",), 16, 20, 60, 160, sides=_TO_NANOGPT, goals=(STEP_GOAL,)),
    "save gpt2_1558m": Group(("gpt2_1558m",), 4, 1, 90, 240, goals=SAVE_GOALS),
    "step gpt2_1558m": Group(("gpt2_1558m",), 8, 3, 60, 240, sides=_TO_NANOGPT, goals=(STEP_GOAL,)),
    "step llama3_1b": Group(("llama3_1b",), 4, 5, 60, 120, sides=_TO_THEIRS),
    "transformers gpt2_124m": Group(("gpt2_124m",), 16, 20, 60, 90, sides=_TO_THEIRS),
    "transformers gpt2_1558m": Group(("gpt2_1558m",), 8, 3, 90, 180, sides=_TO_THEIRS),
    "step llama3_8b, 8 layers": Group(("llama3_8b", "model.n_layer=8"), 2, 3, 60, 90, sides=_TO_THEIRS),
}
_OTHERS = tuple(name for name, group in GROUPS.items() if not group.goals)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subject."""
    parser.add_argument("--device", default="cuda", help="as train.device (%(default)s)")
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny runs the same code in seconds")
    parser.add_argument("--seconds", type=float, default=480.0, help="of the whole battery (%(default)g)")
    parser.add_argument(
        "--only",
        type=_groups,
        default=tuple(GROUPS),
        metavar="GROUP;...",
        help=f"of {'; '.join(GROUPS)}; `others` are the {len(_OTHERS)} without goals",
    )
    parser.add_argument("--group", choices=GROUPS, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)


def _groups(text: str) -> tuple[str, ...]:
    words = (word.strip() for word in text.split(";"))
    names = tuple(name for word in words for name in (_OTHERS if word == "others" else (word,)))
    if unknown := set(names) - set(GROUPS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return names


def measure(options: argparse.Namespace, folder: Path) -> list[str]:
    """Measure the groups, and return their tables.

    Raises:
        SystemExit: without such a device.
    """
    if options.group is not None:
        _measure_group(options.group, options, folder)
        return []
    try:
        device = choose_device(options.device, 0)
    except LaunchError as error:
        raise SystemExit(f"bench cuda: {error}") from error
    start, lines = time.monotonic(), list[str]()
    document: dict[str, object] = {
        "device": device_name(device),
        "machine": [*machine.describe_device(device), *machine.describe(folder)],
        "size": options.size,
    }
    rows, goals = list[Row](), list[str]()
    for name in options.only:
        measured = [{"group": name, **row} for row in _run_group(name, options, start + options.seconds, folder)]
        lines += [f"{name}:", "", *report(measured, COPY, GROUPS[name].goals), ""]
        rows += measured
        goals += [f"{name}, {', '.join(filter(None, goal.cells(measured)))}" for goal in GROUPS[name].goals]
        # Every time: a machine may be taken back.
        _write({**document, "seconds": round(time.monotonic() - start, 1), "rows": rows, "goals": goals})
    return [*(f"- {line}" for line in machine.describe_device(device)), "", *lines, *(f"- {goal}" for goal in goals)]


def _write(document: Mapping[str, object]) -> None:
    out = os.environ.get("OUT")
    if out:
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / "bench-cuda.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _run_group(name: str, options: argparse.Namespace, end: float, folder: Path) -> list[Row]:
    """Measure a group in a process of its own; return its rows, the last with how it failed as a whole."""
    group, left_s = GROUPS[name], end - time.monotonic() - _GRACE_S
    if options.size == "full" and left_s < group.least_s:
        return [_all(f"begins with {group.least_s:.0f} s, {max(0.0, left_s):.0f} s were left")]
    seconds = max(1.0, min(group.most_s, left_s))
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        results = Path(scratch) / "rows.jsonl"
        command = [sys.executable, "-m", "scripts.bench", "cuda", "--group", name, "--size", options.size]
        command += ["--device", options.device, "--folder", scratch, "--seconds", f"{seconds:.0f}"]
        print(f"{time.strftime('%H:%M:%S')} {name}: up to {seconds:.0f} s", file=sys.stderr, flush=True)
        process = subprocess.Popen([*command, "--results", str(results)], start_new_session=True)
        reason = ""
        try:
            status = process.wait(seconds + _GRACE_S)
            reason = f"its process ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            reason = f"ended after {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return [*read(results), *([_all(reason)] if reason else [])]


def _all(reason: str) -> Row:
    return {"side": "the rest", "round": 0, LEFT_OUT: reason}


def _measure_group(name: str, options: argparse.Namespace, folder: Path) -> None:
    """Measure a group in this process, and add its rows to the file of results."""
    group, is_tiny, tell = GROUPS[name], options.size == "tiny", partial(append, options.results)
    cluster = launch.start(options.device, deterministic=False, threads=int(is_tiny), variables={})
    device = cluster.device
    if device.type != "cpu":
        torch.set_float32_matmul_precision("high")  # as in nanoGPT; what is left in float32 is small on every side
    model, samples, length = group.model, group.samples, 1024
    eager = "" if is_tiny else machine.compile_error(device)
    if is_tiny:
        model, samples, length = (f"{model[0].partition('_')[0]}_tiny",), 2, 16
        group = replace(group, steps=1)
    if eager:
        tell({"side": "torch.compile", "round": 0, LEFT_OUT: eager})
    train = ("train.dtype=bfloat16", f"train.compile={str(not (is_tiny or eager)).lower()}")
    config = config_of(*model, *train, samples=samples, seq_length=length)
    sides = step_sides(group, config, cluster) if group.sides else save_sides(config, cluster, folder)
    end = time.monotonic() + options.seconds
    for side, (call, least_s) in sides.items():
        row = {side: BenchSide(call, 0.0 if is_tiny else least_s)}
        take_turns(row, 1, tell=tell, seconds=end - time.monotonic())
        torch.compiler.reset()
        gc.collect()
        if device.type != "cpu":
            torch.accelerator.empty_cache()
            getattr(torch._C, "_host_emptyCache", lambda: None)()  # pinned memory, which torch keeps otherwise


def step_sides(group: Group, config: Config, cluster: Cluster) -> Mapping[str, tuple[Callable[[], Figures], float]]:
    """Return the sides of a step, each with the least seconds with which it is begun; nanoGPT has GPT-2 alone."""
    steps = {OURS: our_step, NANOGPT: nanogpt_step, THEIRS: their_step}
    names = [side for side in group.sides if side != NANOGPT or config.model.family is Family.gpt2]
    return {side: (partial(_time, steps[side], group.steps, config, cluster), 60) for side in names}


def _time(build: Callable[..., Step], steps: int, config: Config, cluster: Cluster) -> Figures:
    """Build a side, warm it up and time blocks of steps."""
    start, step, device = time.perf_counter(), build(config, cluster), cluster.device
    for _ in range(3):
        step()
    synchronize(device)
    warm_up_s, peak = time.perf_counter() - start, _device_peak(device)
    figures = time_steps(step, config, steps, device, blocks=5) | {"warm-up, s": warm_up_s, **peak()}
    flops = peak_flops(device_name(device))
    if flops is not None:
        figures["MFU, %"] = (
            100 * figures[RATE] * families.flops_per_token(config.model, config.train.seq_length) / flops
        )
    return figures


def _device_peak(device: torch.device) -> Callable[[], Figures]:
    """Begin to measure the most memory that tensors take on a device; there is no figure on a CPU."""
    if device.type == "cpu":
        return dict
    torch.accelerator.reset_peak_memory_stats(device)
    return lambda: {"device's peak, GB": torch.accelerator.max_memory_allocated(device) / 1e9}


def save_sides(config: Config, cluster: Cluster, folder: Path) -> Mapping[str, tuple[Callable[[], Figures], float]]:
    """Return the sides in their order: the files of our save are those that are loaded."""
    subject = build_subject(config, cluster)
    engine = partial(opened_checkpointer, subject, folder / "ours")

    def dcp(kind: AsyncCheckpointerType) -> Callable[[], Figures]:
        return lambda: _cost(subject, partial(opened_dcp, subject, kind, folder / kind.name))

    return {
        COPY: (partial(_copy, subject), 30),
        OURS: (partial(_cost, subject, engine), 45),
        LOAD: (lambda: _load(subject, lambda: load_ours(subject, folder / "ours")), 15),
        LOAD_FILE: (lambda: _load(subject, lambda: _load_file(folder / "ours", str(cluster.device))), 15),
        THREAD: (dcp(AsyncCheckpointerType.THREAD), 60),
        PROCESS: (dcp(AsyncCheckpointerType.PROCESS), 75),
    }


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
    is_pinned = subject.cluster.device.type != "cpu"
    targets = [torch.empty(s.shape, dtype=s.dtype, pin_memory=is_pinned) for s in sources]

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)

    return {STALL: median(_seconds(subject, copy) for _ in range(3)), "state, GB": subject.own_bytes / 1e9}


def _cost(subject: Subject, saver: Callable[[], AbstractContextManager[Begin]]) -> Figures:
    """Measure two saves, of which the first allocates what the second uses, with the iterations that follow.

    The stall is the call and the first iteration after it, less a quiet iteration; the cost is that of all that follow.
    """
    device, iterate, figures = subject.cluster.device, subject.iteration(), Figures()
    quiet_s = median([_seconds(subject, iterate) for _ in range(8)][3:])
    with saver() as begin:
        for number in (1, 2):
            figures["first stall, s"] = figures.get(STALL, 0.0)
            grown, device_peak = peak_memory(), _device_peak(device)
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
                "step, ms": quiet_s * 1e3,
                **grown(),
                **device_peak(),
            }
    return figures


def _load(subject: Subject, call: Callable[[], object]) -> Figures:
    """Load from the page cache; the least of some times."""
    return {SECONDS: min(_seconds(subject, call) for _ in range(3))}


def _load_file(folder: Path, device: str) -> None:
    """Load our files with safetensors alone, which checks no digest and makes new tensors."""
    for path in sorted(folder.rglob("iter_0000002/*.safetensors")):
        safetensors.torch.load_file(path, device=device)
