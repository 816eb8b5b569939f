"""Describes the machine of a measurement."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sysconfig
from pathlib import Path
from subprocess import SubprocessError

import torch

from trainer.launch.device import device_name, memory_bytes


def describe(folder: Path) -> list[str]:
    """Return a line per machine property that affects figures; `folder` is the folder of the files."""
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


def describe_device(device: torch.device) -> list[str]:
    """Return the lines of an accelerator and of what the compiler needs for it; none for a CPU."""
    if device.type == "cpu":
        return []
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    tools = {
        "triton": importlib.util.find_spec("triton"),
        "a C compiler": os.environ.get("CC") or next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None),
        "Python.h": headers.exists(),
    }
    missing = [name for name, tool in tools.items() if not tool]
    return [
        f"device: {device_name(device)}, {memory_bytes(device) / 2**30:.0f} GiB, CUDA {torch.version.cuda}",
        f"for torch.compile: {'without ' + ', '.join(missing) if missing else ', '.join(tools)}",
    ]


def compile_error(device: torch.device) -> str:
    """Return why torch.compile fails on a device, as where there is no C compiler for Triton, or nothing."""
    try:
        torch.compile(_double)(torch.ones(8, device=device))
    except (RuntimeError, OSError, ImportError, SubprocessError) as error:  # Triton calls a compiler as a process
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return ""


def _double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x + 1


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
    device_number = f"{os.major(number)}:{os.minor(number)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        head, _, right = line.partition(" - ")
        if head.split()[2] == device_number:
            kind, device = right.split()[:2]
            return f"{kind} on {Path(device).name}"
    return "an unknown file system"
