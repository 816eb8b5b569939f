"""Describes the machine of a measurement."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def describe(folder: Path) -> list[str]:
    """Return one line per machine property that affects figures; `folder` is the folder of the files."""
    memory = _first("/proc/meminfo", "MemTotal")
    kibibytes = int(memory.split()[0]) if memory else 0
    return [
        f"CPU: {_first('/proc/cpuinfo', 'model name') or platform.machine()}, "
        f"{len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads in torch",
        f"memory: {kibibytes / (1 << 20):.1f} GiB",
        f"kernel: {platform.system()} {platform.release()}",
        f"files: {_file_system(folder)}",
        f"torch {torch.__version__}, Python {platform.python_version()}",
    ]


def _first(path: str, key: str) -> str:
    """Return the value of the first `key: value` line."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def _file_system(folder: Path) -> str:
    """Return the type and the device of a folder's file system. Source: proc_pid_mountinfo(5)."""
    number = os.stat(folder).st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2] == wanted:
            kind, device = right.split()[:2]
            return f"{kind} on {Path(device).name}{_disk(wanted)}"
    return "an unknown file system"


def _disk(number: str) -> str:
    block = Path("/sys/dev/block") / number
    try:
        rotates = (block / "queue" / "rotational").read_text().strip() == "1"
        driver = (block / "device" / "driver").resolve().name
    except OSError:
        return ""
    return f" ({driver}, {'reported as rotational' if rotates else 'solid state'})"
