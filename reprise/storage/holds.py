"""Holds: files in a checkpoint folder which protect the checkpoint from deletion.

A file `hold` belongs to the user, and stays until the user removes it. A file `hold.PID`, or `hold.PID.NONCE`, belongs
to a process, and expires:

- For a process on this machine and in its PID namespace, the kernel decides: the hold lasts as long as the process with
  its id and start time.
- For any other process, and for a file without a readable record, the heartbeat decides: a hold not touched for
  `EXPIRY_S` by the file system's clock has expired. A hold with a time in the future has not.

Deletion looks for holds twice, before and after renaming the checkpoint. A process looks for the folder after taking a
hold. So either the process misses the folder, or the deletion sees the hold.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from reprise.storage.lease import Lease, record_in

HOLD = "hold"
EXPIRY_S = 600.0  # longer than a lock's expiry, which a start waits for
_PROCESS_HOLD = re.compile(r"hold\.\d+(\.[0-9a-f]+)?")
_HIDDEN = 0  # the start time if /proc hides the process from this user
_STATE, _START = 0, 19  # indices in /proc/PID/stat after the name, proc(5)
_DEAD = ("Z", "X")
_BOOT_ID, _NAMESPACE = "/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"


@dataclass(frozen=True, slots=True)
class HoldingProcess:
    """A process owning a hold.

    Args:
        host: The host name, for people to read.
        started: When the process started, in clock ticks since boot.
        boot: The machine's boot id. Empty if unknown.
        namespace: The PID namespace.
    """

    host: str
    pid: int
    started: int
    boot: str
    namespace: str

    def __post_init__(self) -> None:
        if not (type(self.pid) is type(self.started) is int):
            raise TypeError

    @staticmethod
    def of_this_process() -> HoldingProcess:
        """Return the calling process's record."""
        boot, namespace = "", ""
        with contextlib.suppress(OSError):
            boot, namespace = Path(_BOOT_ID).read_text().strip(), os.readlink(_NAMESPACE)
        return HoldingProcess(socket.gethostname(), os.getpid(), _start_time(os.getpid()) or _HIDDEN, boot, namespace)

    def is_alive(self) -> bool | None:
        """Return whether the process runs, or None if it is not visible from here."""
        viewer = HoldingProcess.of_this_process()
        is_visible = bool(self.boot) and (self.boot, self.namespace) == (viewer.boot, viewer.namespace)
        start = _start_time(self.pid) if is_visible else _HIDDEN
        return None if start == _HIDDEN else start == self.started


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

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.name = f"{HOLD}.{os.getpid()}.{secrets.token_hex(4)}"

    @staticmethod
    def take(folder: Path) -> Hold | None:
        """Take a hold and remove expired holds. Return None if the folder does not exist or was renamed.

        Raises:
            OSError: The folder cannot be written.
        """
        hold, is_kept = Hold(folder), False
        try:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                hold.begin(hold._create)
                is_kept = hold.is_in_place()
        finally:
            if not is_kept:  # also after an interrupt: the caller has no hold to release
                hold.release()
        return hold if is_kept else None

    def is_in_place(self) -> bool:
        """Return whether the folder is still at the path where the hold was taken."""
        try:
            return os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self.descriptor))
        except OSError:
            return False

    def _create(self) -> None:
        """Write the record for other hosts to read, and remove expired holds."""
        folder = self.descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        for name in os.listdir(folder):
            if _PROCESS_HOLD.fullmatch(name) and not _is_valid(self.path / name, file_system_time):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)
        file = os.open(self.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder)
        try:
            os.write(file, json.dumps(asdict(HoldingProcess.of_this_process())).encode())
            os.fsync(file)
        finally:
            os.close(file)

    def beat(self) -> None:
        os.utime(self.name, dir_fd=self.descriptor)

    def give_up(self) -> None:
        """Remove the hold, wherever the folder is now."""
        os.unlink(self.name, dir_fd=self.descriptor)


def _is_valid(path: Path, clock: Callable[[Path], float]) -> bool:
    """Return whether a file is a process's hold and has not expired."""
    if not _PROCESS_HOLD.fullmatch(path.name):
        return False
    try:
        holder = record_in(path, HoldingProcess)
        is_alive = holder.is_alive() if holder is not None else None
        return clock(path.parent) - path.lstat().st_mtime < EXPIRY_S if is_alive is None else is_alive
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _start_time(pid: int) -> int | None:
    """Return when a local process started, in clock ticks since boot; None if it is dead, `_HIDDEN` if hidden."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[_STATE].decode() in _DEAD else int(fields[_START])
    except (OSError, ValueError):
        pass
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        pass
    return _HIDDEN
