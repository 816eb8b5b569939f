"""Describes the machine of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

from trainer.launch.device import CPU, device_name, memory_bytes


def describe(folder: Path) -> list[str]:
    """Return a line per machine property that affects figures; `folder` is the folder of the files."""
    kind = ["stat", "--file-system", "--format=%T", str(folder)]
    return [
        f"CPU: {_first('/proc/cpuinfo', 'model name') or platform.machine()}, "
        f"{len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads in torch",
        f"memory: {_first('/proc/meminfo', 'MemTotal')}",
        f"kernel: {platform.system()} {platform.release()}",
        f"files: {subprocess.run(kind, capture_output=True, text=True, check=True).stdout.strip()}",
        f"torch {torch.__version__}, Python {platform.python_version()}",
    ]


def describe_device(device: torch.device) -> list[str]:
    """Return the line of an accelerator; none for a CPU."""
    if device.type == CPU:
        return []
    return [f"device: {device_name(device)}, {memory_bytes(device) / 2**30:.0f} GiB, CUDA {torch.version.cuda}"]


def compile_error(device: torch.device) -> str:
    """Return why torch.compile fails on a device, as where there is no C compiler for Triton, or nothing."""
    try:
        torch.compile(_double)(torch.ones(8, device=device))
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:  # Triton runs a C compiler
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return ""


def _double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x + 1


def _first(path: str, key: str) -> str:
    """Return the value of the first `key: value` line, or nothing."""
    lines = Path(path).read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
