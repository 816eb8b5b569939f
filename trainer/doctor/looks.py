"""Checks a machine, and a folder's file system."""

from __future__ import annotations

import errno
import os
import platform
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from reprise.errors import TrainerError
from reprise.saving import SharedMemory
from reprise.storage import FILE_SYSTEM, Files, FolderLock, describe_free_space, exists
from reprise.tensors import map_memory
from trainer.launch.device import device_name
from trainer.record.environment import kernel_record

FINE, WORSE, BAD = "ok", "slower", "MISSING"
_SPEED_BYTES = 256 << 20
_ROOM_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """A check's result. `verdict` is `FINE`, `WORSE` or `BAD`."""

    what: str
    verdict: str
    found: str

    @property
    def is_bad(self) -> bool:
        return self.verdict == BAD


def machine() -> Iterator[Finding]:
    """Check Python, torch, the processor, devices, backends and memory."""
    yield Finding("Python", FINE, f"{platform.python_version()} on {platform.system()} {platform.release()}")
    release = tuple(int(number) for number in torch.__version__.split("+")[0].split(".")[:2])
    yield Finding("torch 2.11 or newer", FINE if release >= (2, 11) else BAD, torch.__version__)
    cores = len(os.sched_getaffinity(0))
    yield Finding("cores for this process", FINE, f"{cores} of {os.cpu_count()}")
    yield Finding("memory", FINE, f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB")
    record = kernel_record()
    processor, math = record["processor"], record["math"]
    yield Finding("processor", FINE, f"{processor['name']}, caches {processor['caches']}")
    settings = f", {math['settings']}" if math["settings"] else ""
    libraries = f"MKL {math['mkl']}, oneDNN {math['onednn']}, float32 products {math['float32_products']}"
    yield Finding("kernels", FINE, f"{math['kernels']}, {libraries}{settings}")
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = 0 if kind is None else torch.accelerator.device_count()
    names = [device_name(torch.device(kind.type, number)) for number in range(count) if kind is not None]
    yield Finding("accelerators", FINE if count else WORSE, ", ".join(names) or "none: train.device=cpu")
    yield Finding("backend gloo", FINE if dist.is_gloo_available() else BAD, "for ranks on CPUs, and messages")
    if kind is not None:
        backend = dist.get_default_backend_for_device(kind)
        yield Finding(f"backend {backend}", FINE if dist.is_backend_available(backend) else BAD, f"for {kind} devices")
    yield _shared_memory()


def folder(path: Path) -> Iterator[Finding]:
    """Check what a folder's file system supports, in a temporary folder."""
    scratch = path / f".doctor-{secrets.token_hex(4)}"
    files = FILE_SYSTEM
    missing = missing_folders(path)
    try:
        try:
            scratch.mkdir(parents=True)
        except OSError as error:
            yield Finding(
                "a folder can be created", BAD, f"{error.filename}: {error.strerror}{_room_left(files, error)}"
            )
            return
        for what, check in _CHECKS.items():
            try:
                verdict, detail = check(files, scratch)
            except OSError as error:
                verdict, detail = BAD, f"{error.strerror} (errno {error.errno})"
            except TrainerError as error:
                verdict, detail = BAD, str(error)
            yield Finding(what, verdict, detail)
    finally:
        if os.path.lexists(scratch):
            shutil.rmtree(scratch)
        remove(missing)


def missing_folders(path: Path) -> list[Path]:
    """Return the missing folders among a path and its parents, innermost first."""
    return [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]


def remove(folders: Sequence[Path]) -> None:
    """Remove new folders, innermost first. Folders in use by others stay."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _room_left(files: Files, error: OSError) -> str:
    """Describe the free space if the disk is full. Empty for any other error."""
    if error.errno != errno.ENOSPC:
        return ""
    return f", {describe_free_space(files, Path(error.filename).parent)}"


def _shared_memory() -> Finding:
    try:
        memory = SharedMemory.make()
    except (OSError, AttributeError) as error:
        return Finding("memory shared by ranks", WORSE, f"{error}: columns are written row by row")
    reopened = SharedMemory.open(memory.address)
    memory.close()
    if reopened is None:
        return Finding("memory shared by ranks", WORSE, "/proc does not show it: columns are written row by row")
    reopened.close()
    return Finding("memory shared by ranks", FINE, "memfd, through /proc")


def _free_space(files: Files, scratch: Path) -> tuple[str, str]:
    free = files.free_bytes(scratch)
    if files.free_inodes(scratch) == 0:
        return BAD, "no inodes left: no file can be created"
    if free is None:
        return WORSE, "the file system does not report it: a full disk is noticed late"
    return (FINE if free > _ROOM_BYTES else BAD), f"{free / 1e9:.1f} GB free"


def _rename(files: Files, scratch: Path) -> tuple[str, str]:
    """Rename a folder to a new name and a file over another, and check the result."""
    (scratch / "a").mkdir()
    files.write_whole(scratch / "a" / "file", b"new")
    files.rename(scratch / "a", scratch / "b")
    files.write_whole(scratch / "old", b"old")
    files.rename(scratch / "b" / "file", scratch / "old")
    files.sync_folder(scratch)
    is_so = (scratch / "old").read_bytes() == b"new" and not exists(scratch / "a")
    return (FINE if is_so else BAD), "of folders and over files, with fsync"


def _lock(files: Files, scratch: Path) -> tuple[str, str]:
    with FolderLock(scratch, "doctor"):
        return FINE, "flock"


def _reserve(files: Files, scratch: Path) -> tuple[str, str]:
    descriptor = files.open_for_writing(scratch / "reserved")
    try:
        files.reserve(descriptor, 1 << 20)
        blocks = os.fstat(descriptor).st_blocks
    finally:
        files.close(descriptor)
    return (FINE, "fallocate") if blocks else (WORSE, "no fallocate: a full disk is noticed late")


def _direct(files: Files, scratch: Path) -> tuple[str, str]:
    """Write through the page cache and around it, and report the speeds."""
    data, seconds = map_memory(_SPEED_BYTES), dict[str, float]()
    data[:] = 1
    cached = files.open_for_writing(scratch / "data")
    direct = files.open_direct(scratch / "data")
    try:
        files.reserve(cached, data.nbytes)
        for name, descriptor in {"page cache": cached, "O_DIRECT": direct}.items():
            if descriptor is not None:
                start = time.perf_counter()
                files.write(descriptor, data.data, offset=0)
                files.sync(cached)
                seconds[name] = time.perf_counter() - start
    except OSError:
        if "page cache" not in seconds:
            raise
    finally:
        for descriptor in (cached, direct):
            if descriptor is not None:
                files.close(descriptor)
    speeds = ", ".join(f"{name} {data.nbytes / took / 1e9:.2f} GB/s" for name, took in seconds.items())
    return (FINE if "O_DIRECT" in seconds else WORSE), f"{speeds}, durable"


_CHECKS: dict[str, Callable[[Files, Path], tuple[str, str]]] = {
    "free space": _free_space,
    "atomic rename": _rename,
    "lock": _lock,
    "blocks can be reserved": _reserve,
    "O_DIRECT, and speed": _direct,
}
