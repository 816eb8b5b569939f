"""Check whether this machine and a folder can train and save a run, and how fast: `reprise doctor [FOLDER|URL]`.

Under torchrun it looks at every host in turn, and checks for a common folder of all of them; rank 0 prints.
Exit status: 0 when a run can train and save here, 1 when it cannot, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import platform
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from reprise.channel import Hosts, find_hosts
from reprise.errors import TrainerError, count_of
from reprise.files import FILE_SYSTEM, Files, describe_free_space, exists, is_store_url, why_unseen
from reprise.folder import CheckpointFolder, FolderLock
from reprise.live_tensors import map_memory
from reprise.savers import SharedMemory, probe_store
from trainer.commands.arguments import local_path
from trainer.config.terms import WAY_OUT
from trainer.launch import process_group
from trainer.launch.device import device_name
from trainer.launch.environment import Environment
from trainer.launch.process_group import Cluster
from trainer.record.environment import kernel_record

FINE, WORSE, BAD = "ok", "slower", "MISSING"
_SPEED_BYTES = 256 << 20
_ROOM_BYTES = 1 << 30
_JOIN_S = 120.0
_LOOKS_S = 24 * 3600.0  # most time for the looks of all hosts, one after the other


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: `verdict` is `FINE`, `WORSE` or `BAD`."""

    what: str
    verdict: str
    found: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Look at the machine and a folder, print a line for each thing, and return the exit status."""
    parser = argparse.ArgumentParser(prog="reprise doctor", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", nargs="?", default=".", help="where runs would be saved (here), or a store's URL")
    options = parser.parse_args(arguments)
    if is_store_url(options.folder):
        return _check_store(options.folder)
    try:
        options.folder = local_path(options.folder)
    except argparse.ArgumentTypeError as error:
        parser.error(f"argument folder: {error}")
    try:
        if Environment.read(os.environ).world_size > 1:
            return _on_all_hosts(options.folder)
    except TrainerError as error:
        print(f"reprise doctor: {error}", file=sys.stderr)
        return 1
    return _print(chain(machine(), folder(options.folder)))


def _check_store(text: str) -> int:
    """Look at a store, in this process alone, and return the exit status."""
    try:
        looks = probe_store(text)
    except TrainerError as error:
        print(f"reprise doctor: {error}", file=sys.stderr)
        return 1
    verdicts = {True: FINE, None: WORSE, False: BAD}
    return _print(Finding(look.what, verdicts[look.is_fine], look.found) for look in looks)


def _print(findings: Iterable[Finding]) -> int:
    """Print a line for each finding as it comes, and return the exit status."""
    status = 0
    for finding in findings:
        print(f"{finding.verdict:8} {finding.what:28} {finding.found}", flush=True)
        status = 1 if finding.verdict == BAD else status
    return status


def _on_all_hosts(path: Path) -> int:
    """Look at every host of a launch, and return the exit status. A call of all ranks.

    Raises:
        TrainerError: if the ranks do not join, or a rank ends.
    """
    cluster = process_group.start("cpu", deterministic=False, timeout_s=_JOIN_S)
    hosts = find_hosts(cluster.channel, cluster.local_ranks, "doctor")
    status = _check_by_turns(path, cluster, hosts)
    shared = one_folder(path, cluster, hosts)
    if cluster.rank == 0:
        joined = Finding("ranks join", FINE, f"{cluster.world_size} on {count_of(len(hosts.names), 'host')}")
        print("all hosts", flush=True)
        status |= _print([joined, shared])
    status = int(cluster.channel.from_first("doctor/status", lambda: status))
    process_group.shutdown(cluster)
    return status


def _check_by_turns(path: Path, cluster: Cluster, hosts: Hosts) -> int:
    """Let the first rank of each host look, in turn lest they slow each other down, and rank 0 print.

    Returns:
        The exit status of these looks, the same on all ranks.
    """
    channel, status = cluster.channel.clone(_LOOKS_S), 0
    for number, leader in enumerate(hosts.leaders):
        key = f"doctor/{leader}"
        if cluster.rank == 0 and leader != 0:
            channel.put(f"{key}/turn", json.dumps(True).encode())
        if cluster.rank == leader:
            if leader != 0:
                channel.take(f"{key}/turn", sender="rank 0")
            looks = [*machine(), *folder(path)]
            channel.put(f"{key}/found", json.dumps([astuple(look) for look in looks]).encode())
        if cluster.rank == 0:
            findings = json.loads(channel.take(f"{key}/found", sender=f"rank {leader}"))
            print(_describe(hosts, number, hosts.ranks[number]), flush=True)
            status |= _print([Finding(*look) for look in findings])
    return int(channel.from_first("doctor/looked", lambda: status))


def one_folder(path: Path, cluster: Cluster, hosts: Hosts) -> Finding:
    """Look whether every rank sees the folder of rank 0, by the marker file of a run. A call of all ranks.

    Returns:
        The finding, on rank 0.
    """
    what, files, problem = "one folder for all hosts", FILE_SYSTEM, ""
    mark = CheckpointFolder(path, files).mark(cluster.nonce)
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    try:
        if cluster.rank == 0:
            try:
                path.mkdir(parents=True, exist_ok=True)
                files.mark(mark)
            except OSError as error:
                problem = f"not known: {error.filename}: {error.strerror}"
        problem = cluster.channel.broadcast("doctor/marked", problem.encode()).decode()
        unseen = "" if problem or cluster.rank == 0 else why_unseen(mark, files)
        reasons = [reason.decode() for reason in cluster.channel.gather("doctor/unseen", unseen.encode())]
    finally:
        if cluster.rank == 0:
            with contextlib.suppress(OSError):  # a run sweeps it
                files.remove_file(mark)
            _remove(missing)
    blind = [
        f"{_describe(hosts, number, blind_ranks)}: {reasons[blind_ranks[0]]}"
        for number, ranks in enumerate(hosts.ranks)
        if (blind_ranks := [rank for rank in ranks if rank < len(reasons) and reasons[rank]])
    ]
    if problem or not blind:
        return Finding(
            what, BAD if problem else FINE, problem or f"{count_of(len(hosts.names), 'host')} and every rank"
        )
    fix = f"Mount the same file system at this path on every host. {WAY_OUT}"
    return Finding(what, BAD, f"{mark.absolute()} of rank 0 is not seen by {'; '.join(blind)}. {fix}")


def _describe(hosts: Hosts, number: int, ranks: Sequence[int]) -> str:
    numbers = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    return f"host {hosts.names[number]} ({numbers})"


def machine() -> Iterator[Finding]:
    """Look at Python, torch, the processor, devices, backends and memory."""
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
    """Look at what the file system of a folder can do, in a temporary folder."""
    scratch = path / f".doctor-{secrets.token_hex(4)}"
    files = FILE_SYSTEM
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    try:
        try:
            scratch.mkdir(parents=True)
        except OSError as error:
            yield Finding("a folder can be made", BAD, f"{error.filename}: {error.strerror}{_room_left(files, error)}")
            return
        for what, look in _LOOKS.items():
            try:
                verdict, detail = look(files, scratch)
            except OSError as error:
                verdict, detail = BAD, f"{error.strerror} (errno {error.errno})"
            except TrainerError as error:
                verdict, detail = BAD, str(error)
            yield Finding(what, verdict, detail)
    finally:
        if os.path.lexists(scratch):
            shutil.rmtree(scratch)
        _remove(missing)


def _remove(folders: Sequence[Path]) -> None:
    """Remove new folders, the innermost first; a folder in use by others stays."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _room_left(files: Files, error: OSError) -> str:
    """Describe the free space, if the error says there is none; an empty string for any other error."""
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
        return BAD, "no inodes left: no file can be made"
    if free is None:
        return WORSE, "the file system does not say: a full disk shows late"
    return (FINE if free > _ROOM_BYTES else BAD), f"{free / 1e9:.1f} GB free"


def _rename(files: Files, scratch: Path) -> tuple[str, str]:
    """Rename a folder over nothing and a file over another, and see what is there."""
    (scratch / "a").mkdir()
    files.write_whole(scratch / "a" / "file", b"new")
    files.rename(scratch / "a", scratch / "b")
    files.write_whole(scratch / "old", b"old")
    files.rename(scratch / "b" / "file", scratch / "old")
    files.sync_folder(scratch)
    is_so = (scratch / "old").read_bytes() == b"new" and not exists(scratch / "a")
    return (FINE if is_so else BAD), "of folders and over files, made durable"


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
    return (FINE, "fallocate") if blocks else (WORSE, "no fallocate: a full disk shows late")


def _direct(files: Files, scratch: Path) -> tuple[str, str]:
    """Write around the page cache and through it, and tell how fast."""
    data, seconds = map_memory(_SPEED_BYTES), dict[str, float]()
    data[:] = 1
    cached = files.open_for_writing(scratch / "data")
    direct = files.open_direct(scratch / "data")
    try:
        files.reserve(cached, data.nbytes)
        for name, descriptor in {"page cache": cached, "O_DIRECT": direct}.items():
            if descriptor is not None:
                start = time.perf_counter()
                files.write(descriptor, [data.data], offset=0)
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


_LOOKS: dict[str, Callable[[Files, Path], tuple[str, str]]] = {
    "free space": _free_space,
    "atomic rename": _rename,
    "lock": _lock,
    "blocks can be reserved": _reserve,
    "O_DIRECT, and speed": _direct,
}


if __name__ == "__main__":
    sys.exit(main())
