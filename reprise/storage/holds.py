"""Holds: files in a checkpoint folder which protect the checkpoint from deletion.

A file `hold` belongs to the user, and stays until the user removes it. A file `hold.PID`, or `hold.PID.NONCE`, belongs
to a process, and expires:

- On the process's host, until it boots again, flock(2) decides: the hold lasts as long as the process keeps the file
  open.
- For any other process, and for a file without a readable record, the heartbeat decides: a hold not touched for
  `EXPIRY_S` by the file system's clock has expired. A hold with a time in the future has not.

Deletion looks for holds twice, before and after renaming the checkpoint. A process looks for its hold after taking it.
So either the process misses the folder, or the deletion sees the hold.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from reprise.storage.lease import Lease, is_alive
from reprise.storage.paths import is_symlink

HOLD = "hold"
EXPIRY_S = 600.0  # longer than a lock's expiry, which a start waits for
_PROCESS_HOLD = re.compile(r"hold\.\d+(\.[0-9a-f]+)?")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine(*namespaces: Path) -> str:
    """Identify this host, by default for all its containers: flock reaches from one to the other.

    Hosts may share a name, and flock may not reach from one to the other.

    Args:
        namespaces: Files in `/proc` naming the namespaces that processes must share to be on the same host.
    """
    try:
        numbers = [str(namespace.stat().st_ino) for namespace in namespaces]
        return " ".join([socket.gethostname(), _BOOT_ID.read_text().strip(), *numbers])
    except OSError:
        return secrets.token_hex(8)  # equal to no other


def file_system_time(folder: Path) -> float:
    """Return the current Unix time by the folder's file system, a clock shared by all its hosts.

    Raises:
        OSError: The folder cannot be written.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        os.utime(file.fileno())  # as a heartbeat does
        return os.fstat(file.fileno()).st_mtime


def is_held(folder: Path, *, clock: Callable[[Path], float] = file_system_time) -> bool:
    """Return whether a folder has an unexpired hold. True if it cannot be read now.

    Args:
        clock: Returns the time by a folder's file system.
    """
    try:
        return any(name == HOLD or _is_valid(folder / name, clock) for name in [path.name for path in folder.iterdir()])
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


class Hold(Lease):
    """This process's hold on a checkpoint folder, which it follows through renames."""

    @staticmethod
    def take(folder: Path) -> Hold | None:
        """Take a hold and remove expired holds. Return None if the folder does not exist or was renamed.

        Raises:
            OSError: The folder cannot be written.
        """
        nonce = secrets.token_hex(4)
        hold, is_kept = Hold(folder / f"{HOLD}.{os.getpid()}.{nonce}", nonce, machine()), False
        try:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if not is_symlink(folder):
                    hold.begin(hold._create)
                    # Whether the folder is still at its path.
                    is_kept = os.path.samestat(os.stat(hold.path), os.fstat(hold.descriptor))
        finally:
            if not is_kept:  # also after an interrupt: the caller has no hold to release
                hold.release()
        return hold if is_kept else None

    def _create(self) -> None:
        """Remove expired holds, and write the record for other processes to read."""
        for path in self.path.parent.iterdir():
            if _PROCESS_HOLD.fullmatch(path.name) and not _is_valid(path, file_system_time):
                with contextlib.suppress(OSError):
                    path.unlink()
        self.descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # without flock, the heartbeat decides
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        self.write_record()
        os.fsync(self.descriptor)

    def beat(self) -> None:
        os.utime(self.descriptor)

    def give_up(self) -> None:
        """Remove the hold, wherever the folder is now."""
        os.unlink(os.readlink(f"/proc/self/fd/{self.descriptor}"))


def _is_valid(path: Path, clock: Callable[[Path], float]) -> bool:
    """Return whether a file is a process's hold and has not expired."""
    if not _PROCESS_HOLD.fullmatch(path.name):
        return False
    try:
        is_running = is_alive(path, machine())
        return clock(path.parent) - path.lstat().st_mtime < EXPIRY_S if is_running is None else is_running
    except FileNotFoundError:
        return False
    except OSError:
        return True
