"""Checks a machine, and a folder's file system."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

import reprise
from reprise.errors import TrainerError
from reprise.storage import FILE_SYSTEM
from trainer.launch.device import device_name

FINE, WORSE, BAD = "ok", "slower", "MISSING"
_SAVED_BYTES = 256 << 20
_ROOM_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """A check's result. `verdict` is `FINE`, `WORSE` or `BAD`."""

    what: str
    verdict: str
    found: str


def machine() -> Iterator[Finding]:
    """Check Python, torch, the processor, devices and backends."""
    yield Finding("Python", FINE, f"{platform.python_version()} on {platform.system()} {platform.release()}")
    release = tuple(int(number) for number in torch.__version__.split("+")[0].split(".")[:2])
    yield Finding("torch 2.11 or newer", FINE if release >= (2, 11) else BAD, torch.__version__)
    cores = len(os.sched_getaffinity(0))
    yield Finding("cores for this process", FINE, f"{cores} of {os.cpu_count()}")
    yield Finding("memory", FINE, f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB")
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = 0 if kind is None else torch.accelerator.device_count()
    names = [device_name(torch.device(kind.type, number)) for number in range(count) if kind is not None]
    yield Finding("accelerators", FINE if count else WORSE, ", ".join(names) or "none: train.device=cpu")
    yield Finding("backend gloo", FINE if dist.is_gloo_available() else BAD, "for ranks on CPUs, and messages")
    if kind is not None:
        backend = dist.get_default_backend_for_device(kind)
        yield Finding(f"backend {backend}", FINE if dist.is_backend_available(backend) else BAD, f"for {kind} devices")


def folder(path: Path) -> Iterator[Finding]:
    """Check a folder's free space, and whether and how fast it takes a checkpoint, in a temporary folder."""
    try:
        with scratch_folder(path) as scratch:
            free = FILE_SYSTEM.free_bytes(scratch)
            if free is None:
                yield Finding("free space", WORSE, "the file system does not report it: a full disk is noticed late")
            else:
                yield Finding("free space", FINE if free > _ROOM_BYTES else BAD, f"{free / 1e9:.1f} GB")
            yield _checkpoint(scratch)
    except OSError as error:
        yield Finding("a folder can be created", BAD, f"{error.filename}: {error.strerror}")


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder in a folder, or in the nearest parent of a folder that does not exist yet."""
    path = path.resolve()
    parent = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    with TemporaryDirectory(prefix=".doctor-", dir=parent) as name:
        yield Path(name)


def _checkpoint(folder: Path) -> Finding:
    """Save a checkpoint as a loop does, and read it again."""
    what, tensor = "a checkpoint", torch.ones(_SAVED_BYTES // 4)
    start = time.perf_counter()
    try:
        path = reprise.save_state_dict(folder, {"tensor": tensor}, iteration=1)
        middle = time.perf_counter()
        (result,) = reprise.verify(path)
    except (OSError, TrainerError) as error:
        return Finding(what, BAD, str(error))
    if result.problem is not None:
        return Finding(what, BAD, str(result.problem))
    times = {"saved durably": middle - start, "read": time.perf_counter() - middle}
    speeds = ", ".join(f"{name} at {_SAVED_BYTES / seconds / 1e9:.2f} GB/s" for name, seconds in times.items())
    return Finding(what, FINE, speeds)
