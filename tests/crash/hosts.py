"""Ranks that are hosts of their own: a name, mounts, cores and, with a `Link`, a network namespace each.

A second host that sees another folder under the same path:

    apart = on_hosts(run_trainer, {1: [Mount(data, other_data)]})
    ended = call_on_ranks(apart, [f"run.dir={run}", *overrides], folder=run, ranks=2)

No other process sees these mounts, and they end with the rank. A test is skipped where the machine does not allow them.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest

import trainer.__main__
from reprise.loading import open_checkpoint
from reprise.storage import Files
from scripts.faults.run_files import held_ranges
from tests.harness import tensor_files

# linux/sched.h and linux/mount.h
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18


@dataclass(frozen=True, slots=True)
class Mount:
    """What a host sees at `target`, a folder or file that is there.

    Args:
        source: the folder or file that it sees instead; None for an empty file system of its own.
    """

    target: Path
    source: Path | None = None

    def make(self) -> None:
        """Mount it, in a process that `enter_host` has moved; at the start of a rank or later.

        Raises:
            OSError: if it cannot be mounted.
        """
        if self.source is None:
            _mount("tmpfs", self.target, kind="tmpfs")
        else:
            _mount(str(self.source), self.target, flags=_MS_BIND | _MS_REC)

    def make_in(self, pid: int | None) -> None:
        """Mount it on the host of a process that runs, from any other process."""
        process = multiprocessing.get_context("forkserver").Process(target=_make_in, args=(self, pid))
        process.start()
        process.join(120.0)
        assert process.exitcode == 0, "it could not be mounted"


def _make_in(mount: Mount, pid: int) -> None:
    descriptor = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    _check(ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNS))
    mount.make()


def on_hosts(
    function: Callable[[list[str]], None], mounts: Mapping[int, Sequence[Mount]], *, ranks_per_host: int = 1
) -> Callable[[list[str]], None]:
    """Return `function`, a module's own, for `call_on_ranks` and `started`, with ranks on hosts named `host<number>`.

    Args:
        mounts: by host, what its ranks mount before `function` is called.
    """
    require_mounts()
    return partial(_on_host, function, {host: tuple(found) for host, found in mounts.items()}, ranks_per_host)


def _on_host(
    function: Callable[[list[str]], None],
    mounts: Mapping[int, Sequence[Mount]],
    ranks_per_host: int,
    arguments: list[str],
) -> None:
    host, local_rank = divmod(int(os.environ.get("RANK", "0")), ranks_per_host)
    enter_host(f"host{host}")
    os.environ |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(ranks_per_host)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the name of the host leads nowhere
    for mount in mounts.get(host, ()):
        mount.make()
    function(arguments)


def run_trainer(arguments: list[str]) -> None:
    """Run the trainer's command with these overrides."""
    sys.argv = ["trainer", *arguments]
    trainer.__main__.main()


def union(folders: Sequence[Path]) -> dict[str, bytes]:
    """Return the tensor files that the folders of several hosts are together, piece by piece."""
    checkpoints = [open_checkpoint(path, Files()) for path in folders]
    found = {name: bytearray(data) for name, data in tensor_files(folders[0]).items()}
    for checkpoint in checkpoints:
        files = tensor_files(checkpoint.path)
        for place, lo, hi in held_ranges(checkpoint):
            found[place.file][lo:hi] = files[place.file][lo:hi]
    return {name: bytes(data) for name, data in found.items()}


def enter_host(name: str, *, network: str | None = None) -> None:
    """Make this process, which has one thread, the only rank of a host: name, mounts, its share of the cores.

    Args:
        network: the network namespace to move to, as `ip netns` names it.

    Raises:
        OSError: if this machine does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if network is not None:
        descriptor = os.open(f"/var/run/netns/{network}", os.O_RDONLY)
        _check(libc.setns(descriptor, _CLONE_NEWNET))
        os.close(descriptor)
    _check(libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS))
    _check(libc.sethostname(name.encode(), len(name)))
    _mount("none", Path("/"), flags=_MS_REC | _MS_PRIVATE)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)  # as many threads as the ranks of one host would have each
    os.sched_setaffinity(0, (cores[rank * share :] or cores)[:share])
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def _mount(source: str, target: Path, *, kind: str = "none", flags: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.mount(source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), None))


def _check(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"a rank cannot become a host: {os.strerror(code)}")


def require_mounts() -> None:
    """Skip the test where ranks cannot become hosts."""
    if not _can_mount():
        pytest.skip("no mount namespaces can be made here")


@cache
def _can_mount() -> bool:
    process = multiprocessing.get_context("forkserver").Process(target=_try_to_enter)
    process.start()
    process.join(120.0)
    return process.exitcode == 0


def _try_to_enter() -> None:
    try:
        enter_host("host0")
    except OSError:
        sys.exit(1)


def ip(*arguments: str) -> None:
    """Run ip(8).

    Raises:
        OSError: if there is none, or it fails.
    """
    program = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        raise OSError("there is no `ip`")
    ended = subprocess.run([program, *arguments], capture_output=True, text=True)
    if ended.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {ended.stderr.strip()}")


FIRST_HOST = "first host"


@dataclass(frozen=True, slots=True)
class Link:
    """A switch between two hosts, each a network namespace named by `host`, of which rank 0 lives on the first."""

    hosts: tuple[str, str]
    switch: str

    def make(self) -> None:
        """Make hosts, switch and cables.

        Raises:
            OSError: if this machine does not allow it.
        """
        for name in (*self.hosts, self.switch):
            ip("netns", "add", name)
        ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
        ip("-n", self.switch, "link", "set", "switch", "up")
        for number, host in enumerate(self.hosts):
            port = f"port{number}"
            ip("-n", host, "link", "add", "net0", "type", "veth", "peer", "name", port, "netns", self.switch)
            ip("-n", host, "address", "add", f"{self.address(number)}/24", "dev", "net0")
            ip("-n", self.switch, "link", "set", port, "master", "switch", "up")
            for device in ("lo", "net0"):
                ip("-n", host, "link", "set", device, "up")

    def address(self, number: int) -> str:
        """Return a host's address."""
        return f"10.77.0.{number + 1}"

    def enter(self) -> None:
        """Move this rank to its host, which finds rank 0 over the link."""
        host = self.hosts[int(os.environ["RANK"])]
        enter_host(host, network=host)
        os.environ |= {"MASTER_ADDR": self.address(0), "GLOO_SOCKET_IFNAME": "net0"}

    def set(self, state: str, *, at: str) -> None:
        """Bring the link "up" or "down", at the switch, as by a pulled cable, or at the FIRST_HOST's own device."""
        if at == FIRST_HOST:
            ip("-n", self.hosts[0], "link", "set", "net0", state)
            return
        for number in range(len(self.hosts)):
            ip("-n", self.switch, "link", "set", f"port{number}", state)

    def remove(self) -> None:
        """Remove what was made, as far as it was."""
        for name in (*self.hosts, self.switch):
            if Path("/var/run/netns", name).exists():
                ip("netns", "del", name)
