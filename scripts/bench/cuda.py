"""The battery of speed on a device: `python -m scripts.bench.cuda`, or `make bench-cuda`.

Training, saves and loads, each beside other ways in the same run. Every group is measured in a process of its own, so
that its memory is its own, with the time that the battery has left; a table is printed at the end, and everything is
written as JSON to the folder in the environment variable OUT.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from reprise.errors import LaunchError
from scripts.bench import cuda_table, machine
from scripts.bench.cuda_group import EAGER, LEFT_OUT, Clock, Device, MeasuredSide, Setting, measure_sides, read_rows
from scripts.bench.cuda_saves import save_sides
from scripts.bench.cuda_steps import NANOGPT, TRANSFORMERS, step_sides
from scripts.bench.cuda_steps import OURS as STEP_OURS
from scripts.bench.cuda_variants import VARIANTS
from trainer.commands.arguments import existing_folder
from trainer.config.compose import compose
from trainer.launch import process_group as launch
from trainer.launch.device import choose_device, device_name, memory_bytes
from trainer.launch.process_group import Cluster

SIZES = ("full", "tiny")
_GRACE_S = 20.0  # in which a group ends after its time


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of the table measured in a single process.

    Args:
        model: overrides of the full size; a tiny model stands for it in tests.
        least_s: the least seconds with which it is begun; it may take `most_s`.
        state_bytes: its state, with gradients, on the device; larger devices alone measure it.
        disk_bytes: of its files, two saves at most.
        sides: the measured sides; empty for all.
        rows: the group of its rows, if another.
    """

    kind: str
    model: tuple[str, ...]
    tiny: str
    batch: int
    steps: int
    least_s: float
    most_s: float
    state_bytes: float = 0.0
    host_bytes: float = 0.0
    disk_bytes: float = 0.0
    sides: tuple[str, ...] = ()
    rows: str = ""


_GOAL_SIDES, _ALL_SIDES = (STEP_OURS, NANOGPT), (STEP_OURS, TRANSFORMERS)
# The sides that have goals come first; a clock that runs out leaves out the last groups.
GROUPS: Mapping[str, Group] = {
    "step gpt2_124m": Group("step", ("model=gpt2_124m",), "gpt2_tiny", 16, 20, 60, 160, 2e9, sides=_GOAL_SIDES),
    "save gpt2_1558m": Group("save", ("model=gpt2_1558m",), "gpt2_tiny", 4, 1, 90, 240, 26e9, 50e9, 40e9),
    "step gpt2_1558m": Group("step", ("model=gpt2_1558m",), "gpt2_tiny", 8, 3, 60, 240, 26e9, sides=_GOAL_SIDES),
    "step llama3_1b": Group("step", ("model=llama3_1b",), "llama3_tiny", 4, 5, 60, 120, 21e9, sides=_ALL_SIDES),
    "transformers gpt2_124m": Group(
        "step", ("model=gpt2_124m",), "gpt2_tiny", 16, 20, 60, 90, 2e9, sides=(TRANSFORMERS,), rows="step gpt2_124m"
    ),
    "transformers gpt2_1558m": Group(
        "step", ("model=gpt2_1558m",), "gpt2_tiny", 8, 3, 90, 180, 26e9, sides=(TRANSFORMERS,), rows="step gpt2_1558m"
    ),
    "variants gpt2_124m": Group(
        "step", ("model=gpt2_124m",), "gpt2_tiny", 16, 20, 60, 160, 2e9, sides=VARIANTS, rows="step gpt2_124m"
    ),
    "step llama3_8b, 8 layers": Group(
        "step", ("model=llama3_8b", "model.n_layer=8"), "llama3_tiny", 2, 3, 60, 90, 46e9, sides=_ALL_SIDES
    ),
    "save llama3_8b": Group("save", ("model=llama3_8b",), "llama3_tiny", 1, 1, 150, 400, 130e9, 220e9, 200e9),
}


WITHOUT_GOALS = tuple(name for name in GROUPS if name not in {group for group, _ in cuda_table.GOALS})
_GROUPS_HELP = f"{'; '.join(GROUPS)}; `others` are those without goals, {len(WITHOUT_GOALS)} in number"


def setting_of(name: str, size: str) -> Setting:
    """Return the model of a group and how it is measured."""
    group = GROUPS[name]
    if size == "tiny":
        return Setting(compose([f"model={group.tiny}"]).model, 2, 16, False, 1, 2, following=3)
    return Setting(compose(list(group.model)).model, group.batch, 1024, True, group.steps, 5)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the groups, print the table, write the JSON and return 0; 2 without such a device."""
    options = _parser().parse_args(arguments)
    if options.group is not None:
        _measure_group(options)
        return 0
    try:
        device = choose_device(options.device, 0)
    except LaunchError as error:
        print(f"bench_cuda: {error}", file=sys.stderr)
        return 2
    clock, start = Clock(options.seconds), time.monotonic()
    rows: list[dict[str, object]] = []
    document = {
        "device": device_name(device),
        "machine": [*machine.describe_device(device), *machine.describe(options.folder)],
        "size": options.size,
        "rows": rows,
    }
    with tempfile.TemporaryDirectory(prefix="bench-cuda-", dir=options.folder) as folder:
        for name in options.only:
            rows += _run_group(name, options, clock, Path(folder), rows)
            document |= {"seconds": round(time.monotonic() - start, 1), "goals": cuda_table.goals(rows)}
            _write(document)  # every time: a machine may be taken back
    print("\n".join(cuda_table.lines(document)))
    return 0


def _write(document: Mapping[str, object]) -> None:
    out = os.environ.get("OUT")
    if out:
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / "bench-cuda.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _run_group(
    name: str, options: argparse.Namespace, clock: Clock, folder: Path, rows: Sequence[Mapping[str, object]]
) -> list[dict[str, object]]:
    """Measure a group in a process of its own; return its rows, or a row with the reason why it is left out.

    Args:
        rows: those of the groups before.
    """
    group = GROUPS[name]
    if options.size != "tiny" and clock.left_s < group.least_s + _GRACE_S:
        return [_left_out(name, f"begins with {group.least_s:.0f} s, {max(0.0, clock.left_s):.0f} s were left")]
    seconds = max(1.0, min(group.most_s, clock.left_s - _GRACE_S))
    results, scratch = folder / "rows.jsonl", folder / "files"
    results.unlink(missing_ok=True)
    scratch.mkdir()
    command = [sys.executable, "-m", "scripts.bench.cuda", "--group", name, "--size", options.size]
    command += ["--device", options.device, "--folder", str(scratch), "--seconds", f"{seconds:.0f}"]
    command += ["--host-gb", str(options.host_gb)] if options.host_gb is not None else []
    sides = options.sides or _sides_beside(group, rows)
    command += ["--results", str(results), *(["--sides", ";".join(sides)] if sides else [])]
    print(f"{time.strftime('%H:%M:%S')} {name}: up to {seconds:.0f} s", file=sys.stderr, flush=True)
    reason = _run(command, seconds + _GRACE_S)
    measured = [{"group": group.rows or name, **row} for row in read_rows(results)]
    shutil.rmtree(scratch)
    return [*measured, *([_left_out(name, reason, side="the rest")] if reason else [])]


def _sides_beside(group: Group, rows: Sequence[Mapping[str, object]]) -> tuple[str, ...]:
    """Return the sides of a group; ours is among them where no group before has measured it beside them."""
    measured = [row for row in rows if LEFT_OUT not in row and row["group"] == group.rows]
    if not group.rows or any(row["side"] == STEP_OURS for row in measured):
        return group.sides
    return STEP_OURS, *group.sides


def _run(command: Sequence[str], seconds: float) -> str:
    """Run a command, with whatever it starts, for a time; return how it failed, or nothing."""
    process = subprocess.Popen(command, start_new_session=True)
    reason = ""
    try:
        status = process.wait(seconds)
        reason = f"its process ended with status {status}" if status else ""
    except subprocess.TimeoutExpired:
        reason = f"ended after {seconds:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return reason


def _left_out(name: str, reason: str, *, side: str = "all") -> dict[str, object]:
    return {"group": name, "side": side, LEFT_OUT: reason}


def _measure_group(options: argparse.Namespace) -> None:
    """Measure a group in this process."""
    clock = Clock(options.seconds)
    threads = 1 if options.size == "tiny" else 0
    cluster = launch.start(options.device, deterministic=False, threads=threads, variables={})
    if cluster.device.type != "cpu":
        torch.set_float32_matmul_precision("high")  # as in nanoGPT; what is left in float32 is small on every side
    group, device = GROUPS[options.group], Device(cluster.device)
    reason = _no_room(group, cluster, options) if options.size == "full" else ""
    if reason:
        measure_sides({"all": MeasuredSide(_refusing(reason), 0.0)}, device, clock, options.results)
        return
    setting = setting_of(options.group, options.size)
    eager = machine.compile_error(cluster.device) if setting.compiles else ""
    sides = _sides(group, replace(setting, compiles=setting.compiles and not eager), cluster, options.folder)
    names = options.sides or group.sides or tuple(sides)
    chosen = {name: side for name, side in sides.items() if name in names}
    if options.size == "tiny":
        chosen = {name: MeasuredSide(side.measure, 0.0) for name, side in chosen.items()}
    measure_sides(chosen, device, clock, options.results, notes={EAGER: eager} if eager else {})


def _sides(group: Group, setting: Setting, cluster: Cluster, folder: Path) -> Mapping[str, MeasuredSide]:
    return step_sides(setting, cluster) if group.kind == "step" else save_sides(setting, cluster, folder)


def _no_room(group: Group, cluster: Cluster, options: argparse.Namespace) -> str:
    """Return why a group cannot be measured here, or nothing."""
    if cluster.device.type != "cpu" and memory_bytes(cluster.device) < 1.1 * group.state_bytes:
        return f"needs {1.1 * group.state_bytes / 1e9:.0f} GB of the device's memory"
    host = machine.host_bytes() if options.host_gb is None else 1e9 * options.host_gb
    if host < group.host_bytes:
        return f"needs {group.host_bytes / 1e9:.0f} GB of the host's memory, which has {host / 1e9:.0f} (--host-gb)"
    if (free := shutil.disk_usage(options.folder).free) < group.disk_bytes:
        return f"needs {group.disk_bytes / 1e9:.0f} GB of the disk, where {free / 1e9:.0f} are free (--folder)"
    return ""


def _refusing(reason: str) -> Callable[[], dict[str, float]]:
    def measure() -> dict[str, float]:
        raise MemoryError(reason)

    return measure


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_cuda", description=__doc__)
    parser.add_argument("--device", default="cuda", help="as train.device (%(default)s)")
    parser.add_argument("--size", choices=SIZES, default="full", help="tiny runs the same code in seconds")
    parser.add_argument("--seconds", type=float, default=480.0, help="of the whole battery (%(default)g)")
    parser.add_argument("--only", type=_groups, default=tuple(GROUPS), metavar="GROUP;...", help=_GROUPS_HELP)
    parser.add_argument("--sides", type=_names, default=(), metavar="SIDE;...", help="of every group")
    parser.add_argument("--host-gb", type=float, help="the host's memory, where the kernel shows less than it gives")
    parser.add_argument(
        "--folder", type=existing_folder, default=Path(tempfile.gettempdir()), help="of the files saved"
    )
    parser.add_argument("--group", choices=GROUPS, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    return parser


def _groups(text: str) -> tuple[str, ...]:
    names = tuple(each for name in _names(text) for each in (WITHOUT_GOALS if name == "others" else (name,)))
    if unknown := set(names) - set(GROUPS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return names


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(";"))


if __name__ == "__main__":
    sys.exit(main())
