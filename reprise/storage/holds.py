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
from pathlib import Path

from reprise.storage.lease import Holder, Lease
from reprise.storage.paths import open_regular

HOLD = "hold"
EXPIRY_S = 600.0  # longer than a lock's expiry, which a start waits for
_PROCESS_HOLD = re.compile(r"hold\.\d+(\.[0-9a-f]+)?")


def machine(*namespaces: Path) -> str:
    """Identify this host, by default for all its containers: flock reaches from one to the other.

    Hosts may share a name, and flock may not reach from one to the other.

    Args:
        namespaces: Files in `/proc` naming the namespaces that processes must share to be on the same host.
    """
    try:
        numbers = [str(namespace.stat().st_ino) for namespace in namespaces]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([socket.gethostname(), boot, *numbers])
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


def is_held(folder: Path) -> bool:
    """Return whether a folder has an unexpired hold. True if it cannot be read now."""
    try:
        return any(map(_is_valid, folder.iterdir()))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


class Hold(Lease):
    """This process's hold on a checkpoint folder, which it follows through renames."""

    @staticmethod
    def take(folder: Path) -> Hold | None:
        """Take a hold. Return None if the folder does not exist or was renamed.

        Raises:
            OSError: The folder cannot be written.
        """
        nonce = secrets.token_hex(4)
        hold = Hold(folder / f"{HOLD}.{os.getpid()}.{nonce}", nonce, machine())
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            hold.begin(hold._create)
            return hold
        return None

    def _create(self) -> None:
        """Write the record for other processes to read, and check that the folder is still at its path."""
        self.descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with contextlib.suppress(OSError):  # without flock, the heartbeat decides
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        self.write_record()
        self.sync()
        self.path.lstat()

    def beat(self) -> None:
        os.utime(self.descriptor)

    def give_up(self) -> None:
        """Remove the hold, wherever the folder is now."""
        os.unlink(os.readlink(f"/proc/self/fd/{self.descriptor}"))


def _is_valid(path: Path) -> bool:
    """Return whether a file is the user's hold, or a process's that has not expired."""
    if not _PROCESS_HOLD.fullmatch(path.name):
        return path.name == HOLD
    try:
        descriptor = open_regular(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            holder = Holder.of(path)
            if holder is not None and holder.host == machine():
                return False
        except BlockingIOError:
            return True
        except OSError:  # without flock, the heartbeat decides
            pass
        finally:
            os.close(descriptor)
        return file_system_time(path.parent) - path.lstat().st_mtime < EXPIRY_S
    except FileNotFoundError:
        return False
    except OSError:
        return True
