"""File systems on files: made, attached to loop devices, mounted. Needs root; the mounts are private to the process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.faults.job import wait_until
from scripts.faults.power.logged_disk import DISK, SAID

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 1 << 18
_START_S = 30.0


class CannotMount(Exception):
    """Mounting is not possible here: no permission, no FUSE, no such file system, or no program to create it."""


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A file system under test.

    Args:
        kind: its name, for mount(8).
        options: for mount(8), when it is mounted first and after each cut.
        make: the command that makes it, to which the file is added.
        size_bytes: of the disk.
        repair: the command to repair a disk that cannot be mounted; empty if there is none.
    """

    name: str
    kind: str
    options: str
    make: tuple[str, ...]
    size_bytes: int
    repair: tuple[str, ...] = ()


_REPAIRED = 2  # exit statuses of e2fsck(8) below this: nothing to do, or done
_EXT4_BYTES = 160 << 20  # more than 128 MiB: the superblock has a backup
_E2FSCK = ("e2fsck", "-f", "-y")
_EXT4 = ("mkfs.ext4", "-q", "-F", "-b", "4096", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard")
FILE_SYSTEMS = {
    found.name: found
    for found in (
        FileSystem("ext4-writeback", "ext4", "data=writeback", _EXT4, _EXT4_BYTES, _E2FSCK),
        FileSystem("ext4-writeback-commit1", "ext4", "data=writeback,commit=1", _EXT4, _EXT4_BYTES, _E2FSCK),
        FileSystem("ext4-ordered", "ext4", "data=ordered", _EXT4, _EXT4_BYTES, _E2FSCK),
        FileSystem("xfs", "xfs", "nouuid", ("mkfs.xfs", "-q", "-K"), 300 << 20),
        FileSystem("btrfs", "btrfs", "nodiscard", ("mkfs.btrfs", "-q", "-K"), 256 << 20),
    )
}


def mount_for_this_process_alone() -> None:
    """Make mounts private to this process and its children, and remove them with the last process.

    Raises:
        CannotMount: if that is not allowed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        raise CannotMount(f"no mount namespace of its own: {os.strerror(ctypes.get_errno())}")


def make(system: FileSystem, image: Path) -> None:
    """Create a file system in a new file.

    Raises:
        CannotMount: if its program is missing or fails.
    """
    with image.open("xb") as file:
        file.truncate(system.size_bytes)
    _run([*system.make, str(image)])
    _run(["fallocate", "--dig-holes", str(image)])  # zeros need not be copied for each cut


@contextlib.contextmanager
def mounted(system: FileSystem, source: Path, folder: Path) -> Iterator[None]:
    """Mount a device, or a file through a temporary loop device.

    Raises:
        CannotMount: if mounting fails.
    """
    loop = "" if source.is_block_device() else ",loop"
    _run(["mount", "-t", system.kind, "-o", system.options + loop, str(source), str(folder)])
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def repair(system: FileSystem, image: Path) -> bool:
    """Repair a disk that cannot be mounted; return whether it was repaired."""
    if not system.repair:
        return False
    return subprocess.run([*system.repair, str(image)], capture_output=True, check=False).returncode < _REPAIRED


@contextlib.contextmanager
def logged_device(image: Path, log: Path, folder: Path) -> Iterator[Path]:
    """Yield a loop device over an image, whose writes and flushes are logged; `folder` is for its FUSE files.

    Raises:
        CannotMount: if it cannot be created.
    """
    folder.mkdir()
    server = subprocess.Popen(
        [sys.executable, "-m", "scripts.faults.power.logged_disk", *map(str, (folder, image, log))]
    )
    try:
        wait_until(lambda: (folder / DISK).exists() or server.poll() is not None)
        if server.poll() is not None:
            raise CannotMount(f"a FUSE file system cannot be mounted on {folder}")
        try:
            attach = ["losetup", "--direct-io=on", "--find", "--show", str(folder / DISK)]
            device = Path(_run(attach).strip())
            try:
                yield device
            finally:
                _run(["losetup", "--detach", str(device)])
        finally:
            _run(["umount", str(folder)])
            server.wait(_START_S)
    finally:
        server.kill()
        server.wait()


def said_in(folder: Path) -> Path:
    """Return the file, in the folder of a logged device, whose lines go into its log."""
    return folder / SAID


def _run(command: Sequence[str]) -> str:
    """Run a command and return its output."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise CannotMount(f"there is no {command[0]}") from None
    except subprocess.CalledProcessError as error:
        raise CannotMount(f"{' '.join(command)}: {error.stderr.strip()}") from error
