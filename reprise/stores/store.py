"""This process's requests to object stores, which one child process per host makes.

obstore's threads do not survive a fork, and a program may fork after loading a checkpoint, as a DataLoader does. So the
program's child imports obstore, and the program never does. A load's ranks share a child, found by the load's name. It
ends with the rank that started it: a load ends on all ranks together.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import logging
import os
import secrets
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from reprise.errors import ConfigError
from reprise.stores.ranges import KEPT_BYTES

if TYPE_CHECKING:
    from reprise.stores.client import StoreClient

_log = logging.getLogger(__name__)

CONNECTIONS = 16
MOST_TRIES = 4


class Child:
    """The child process, started at its first use. A dead one is replaced, up to `MOST_TRIES` times per request.

    Attributes:
        process: The child, if this process has started it.
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._load = ""
        self._idle: list[Connection] = []  # each makes one request at a time, and closes once it is dropped

    def share(self, load: str) -> None:
        """Share the child of a load's ranks from now on, until its end."""
        if load != self._load:
            self.end()
            self._load = load

    def link(self) -> Connection:
        """Return a new connection.

        Raises:
            ConfigError: obstore is not installed.
        """
        address = f"\0reprise-store-{os.getuid()}-{self._load or f'{_OWN}-{os.getpid()}'}"
        while True:
            with socket.socket(socket.AF_UNIX) as connected, contextlib.suppress(ConnectionError):
                connected.connect(address)
                if not is_of_this_user(connected):
                    raise PermissionError(errno.EACCES, "a process of another user answered", "a store")
                return Connection(connected.detach())
            with socket.socket(socket.AF_UNIX) as listener:
                try:
                    listener.bind(address)
                except OSError:  # another rank starts it
                    continue
                require_obstore()
                listener.listen(4096)
                if self.process is not None:
                    self.process.kill()
                    self.process.wait()
                    _log.warning("the store reader process exited and is restarted")
                number, most_bytes = listener.fileno(), sys.maxsize if self._load else KEPT_BYTES
                self.process = start_process("reprise.stores.child", number, most_bytes, pass_fds=[number])

    def ask(self, call: str, path: Path, *details: object) -> Any:
        """Return a `StoreClient` call's result. For `open`, return the descriptor of a file with a range's bytes.

        Raises:
            Exception: See the `StoreClient` method.
            OSError: The child exits again and again.
        """
        for _ in range(MOST_TRIES):
            try:
                connection = self._idle.pop()
            except IndexError:  # several threads take them
                connection = self.link()
            try:
                connection.send((call, path, *details))
                result, error = connection.recv()
                if call == "open" and error is None:
                    result = recv_handle(connection)
            except (OSError, EOFError):
                self._idle.clear()  # the other connections ended with this one
                continue
            except RuntimeError:  # the descriptor was lost
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path)) from None
            self._idle.append(connection)
            if error is not None:
                raise error
            return result
        raise OSError(errno.EIO, f"the store reader process exited {MOST_TRIES} times", str(path))

    def end(self) -> None:
        """End the child, if this process has started it. Another rank still using it, or the next use, starts one."""
        self._idle.clear()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process, self._load = None, ""


def require_obstore() -> None:
    """Raise ConfigError unless obstore is installed."""
    if importlib.util.find_spec("obstore") is None:
        fix = "Install it with: pip install obstore"
        raise ConfigError("A package for object stores is missing", expected="obstore", fix=fix)


def start_process(module: str, *words: object, **settings: Any) -> subprocess.Popen[bytes]:
    """Start a module as a child process, which ends once its input does: at the latest, with this process.

    It has this program's packages, and an interrupt at a terminal does not reach it.
    """
    process: subprocess.Popen[bytes] = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, words)],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
        **settings,
    )
    _inputs.add(process.stdin)
    return process


_inputs = weakref.WeakSet[Any]()  # of child processes
_OWN = secrets.token_hex(8)  # names the children of this program and its forks

CHILD = Child()


class _ChildClient:
    def __getattr__(self, call: str) -> Callable[..., Any]:
        return partial(CHILD.ask, call)


CHILD_CLIENT = cast("StoreClient", _ChildClient())  # whose calls the child makes


def _forget_in_fork() -> None:
    """Leave all connections and processes to the parent process: two processes would mix up their requests."""
    for file in _inputs:
        file.close()
    CHILD.process = None
    CHILD.end()


os.register_at_fork(after_in_child=_forget_in_fork)


def is_of_this_user(connected: socket.socket) -> bool:
    """Return whether a connection's other end belongs to this user."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())
