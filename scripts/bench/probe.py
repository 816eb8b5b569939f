"""Probes of the cost of a save: a loop that computes, the process's memory, the page cache."""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from reprise.storage import FILE_SYSTEM
from scripts.bench.harness import Figures
from trainer.launch.device import CPU

_libc = ctypes.CDLL(None)
_READ_BYTES = 8 << 20
_FORGET_PEAK = "5"  # proc_pid_clear_refs(5): set VmHWM to what is resident now


@dataclass(slots=True)
class Loop:
    """A loop of matrix products on all cores, with iterations of known length, like a forward and backward pass.

    Args:
        width: size of the square matrices.
        quiet_s: duration of the calibration, in which the loop runs alone.
    """

    width: int = 768
    quiet_s: float = 0.4
    usual_s: float = 0.0
    _matrices: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._matrices = [torch.randn(self.width, self.width) for _ in range(3)]

    def learn(self) -> None:
        """Calibrate: run alone and set `usual_s` to the median time of an iteration."""
        end = time.perf_counter() + self.quiet_s
        times = [self._iterate()]
        while time.perf_counter() < end:
            times.append(self._iterate())
        self.usual_s = statistics.median(times)

    def run_until(self, is_over: Callable[[], bool]) -> float:
        """Run until `is_over`; return the total seconds beyond the usual time of the iterations."""
        lost_s = 0.0
        while not is_over():
            lost_s += self._iterate() - self.usual_s
        return lost_s

    def _iterate(self) -> float:
        start = time.perf_counter()
        a, b, out = self._matrices
        torch.mm(a, b, out=out)
        torch.mm(b, a, out=out)
        return time.perf_counter() - start


def peak_memory() -> Callable[[], Figures]:
    """Begin to measure the peak growth in memory of this process and its children, without the page cache.

    Returns:
        A call for the figure since then, by name; for child processes it counts their current memory. It has no figure
        on a kernel that measures none, such as gVisor's.
    """
    try:
        Path("/proc/self/clear_refs").write_text(_FORGET_PEAK)
    except OSError:
        return dict
    before, children = _status_bytes("self", "VmRSS"), _children_bytes()

    def grown() -> Figures:
        bytes_now = _status_bytes("self", "VmHWM") - before + max(0, _children_bytes() - children)
        return {"peak memory, GB": bytes_now / 1e9}

    return grown


def device_peak(device: torch.device) -> Callable[[], Figures]:
    """Begin to measure the most memory that tensors take on a device; there is no figure on a CPU."""
    if device.type == CPU:
        return dict
    torch.accelerator.reset_peak_memory_stats(device)
    return lambda: {"device's peak, GB": torch.accelerator.max_memory_allocated(device) / 1e9}


def synchronize(device: torch.device) -> None:
    """Wait for the work of a device."""
    if device.type != CPU:
        torch.accelerator.synchronize(device)


def trim() -> None:
    """Return free memory to the system, so that the next allocation is visible. Source: malloc_trim(3)."""
    if hasattr(_libc, "malloc_trim"):  # glibc's
        _libc.malloc_trim(0)


def _status_bytes(process: str, key: str) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    return 0


def _children_bytes() -> int:
    total = 0
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has just ended
            for child in path.read_text().split():
                with contextlib.suppress(OSError):  # so has the process
                    total += _status_bytes(child, "RssAnon")
    return total


def files_of(folder: Path) -> list[Path]:
    """Return every file below a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def read_through(folder: Path) -> None:
    """Load every file below a folder into the page cache."""
    buffer = bytearray(_READ_BYTES)
    for path in files_of(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def evict(folder: Path) -> None:
    """Drop every file below a folder from the page cache; all are durable. Source: posix_fadvise(2), DONTNEED."""
    for path in files_of(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync_all(folder: Path) -> None:
    """Sync files that were written without a sync, and their folders."""
    for path in files_of(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    FILE_SYSTEM.sync_folder(folder)
