"""The requests of this process to object stores. A child process makes them, one for a host.

obstore's threads do not survive a fork, and a program may fork after loading a checkpoint, as a DataLoader does. So no
program imports obstore: its child does. The ranks of a load meet at one child by the name of the load.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import mmap
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from reprise.errors import CheckpointError
from reprise.stores.extra import require_extra
from reprise.stores.ranges import SLOT_BYTES
from reprise.stores.url import StoreUrl

_log = logging.getLogger(__name__)

CONNECTIONS = 16
# obstore tries a request again for two minutes, and a body takes its time; a process that hangs is given up.
_ANSWER_S = 300.0
_END_S = 5.0
MOST_TRIES = 4
FINISH = "finish"  # the order to end once the store has all; any other word wakes a mirror


@dataclass(slots=True)
class Orders:
    """What the process that asked for a mirror wants of it meanwhile. Its members are set by another thread."""

    wake: threading.Event = field(default_factory=threading.Event)
    is_finishing: bool = False


class ChildLink:
    """A connection to a child process: one request at a time, with memory for the bytes of an object."""

    def __init__(self, connected: socket.socket) -> None:
        memory = os.memfd_create("reprise-store", os.MFD_CLOEXEC)
        os.ftruncate(memory, SLOT_BYTES)
        self.memory = mmap.mmap(memory, SLOT_BYTES)
        try:
            socket.send_fds(connected, [b"memory"], [memory])
        finally:
            os.close(memory)
        self.connection = Connection(connected.detach())

    def send(self, *request: object) -> None:
        """Send a request.

        Raises:
            OSError: if the child is gone.
        """
        self.connection.send_bytes(json.dumps(request).encode())

    def answer(self, wait_s: float | None = _ANSWER_S) -> Any:
        """Return the answer; None where the child is gone, or silent for too long."""
        with contextlib.suppress(OSError, EOFError):
            if self.connection.poll(wait_s):
                return json.loads(self.connection.recv_bytes())
        return None


class Child:
    """A child process, started at its first use; a dead one is replaced, up to `MOST_TRIES` times a request.

    Args:
        name: of the load whose ranks share it; empty for this process alone.
        variables: of its environment.
    """

    def __init__(self, name: str = "", **variables: str) -> None:
        self.name, self._variables = name, variables
        self._address = f"\0reprise-store-{os.getuid()}-{name or secrets.token_hex(8)}"
        self._idle: list[ChildLink] = []
        self.process: subprocess.Popen[bytes] | None = None

    def link(self) -> ChildLink:
        """Return a new connection."""
        while True:
            with socket.socket(socket.AF_UNIX) as connected, contextlib.suppress(ConnectionError):
                connected.connect(self._address)
                if not is_of_this_user(connected):
                    raise PermissionError(errno.EACCES, "a process of another user answers", "a store")
                return ChildLink(connected)
            with socket.socket(socket.AF_UNIX) as listener:
                try:
                    listener.bind(self._address)
                except OSError:  # another rank starts it
                    continue
                listener.listen(4096)
                if self.process is not None:
                    self.end()
                    _log.warning("the process that reads stores has ended and is started again")
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "reprise.stores.child", str(listener.fileno()), str(os.getpid())],
                    pass_fds=[listener.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, **self._variables, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    start_new_session=True,  # an interrupt of the terminal is for the program
                )

    def ask(
        self,
        call: str,
        url: StoreUrl,
        *details: object,
        into: memoryview | None = None,
        wait_s: float | None = _ANSWER_S,
    ) -> Any:
        """Return the answer to a request, whose bytes of an object go into a buffer.

        Args:
            wait_s: after which a child that lives counts as hanging; None for a request of any length.

        Raises:
            OSError: as the method of `StoreClient`.
            CheckpointError: as the method of `Upload`, or for a defect of the child.
        """
        for _ in range(MOST_TRIES):
            link, answer = self._idle.pop() if self._idle else self.link(), None
            try:
                link.send(call, url.root, url.key, *details)
                answer = link.answer(wait_s)
                if answer is not None and into is not None:
                    into[:] = memoryview(link.memory)[: into.nbytes]
            except ConnectionError:
                pass
            finally:
                if answer is None:  # one still to come would be taken for the answer to the next request
                    link.connection.close()
                else:
                    self._idle.append(link)
            match answer:
                case ["error", number, text, where]:
                    raise OSError(number, text, where)
                case ["problem", what, parts]:
                    raise CheckpointError(what, **parts)
                case [result]:
                    return result
                case _:
                    if self.process is not None:
                        self.process.kill()  # if it has not ended, it hangs
        raise OSError(errno.EIO, f"the process that reads stores has ended {MOST_TRIES} times", str(url))

    def forget(self) -> None:
        """Close this process's ends of the connections, which a fork has copied."""
        while self._idle:
            self._idle.pop().connection.close()

    def end(self) -> None:
        """Leave the child, which ends once no rank uses it."""
        self.forget()
        if self.process is not None:
            try:
                self.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                if self.name:  # other ranks use it still
                    return
                self.process.kill()
                self.process.wait()


_child: Child | None = None


def child(load: str | None = None) -> Child:
    """Return the child of this process; with the name of a load, the one that the load's ranks share."""
    global _child
    if _child is None or (load is not None and _child.name != load):
        end_child()
        _child = Child(load or "")
    return _child


def ask(url: StoreUrl, call: str, *details: object) -> Any:
    """Return the answer to a request about a place in a store, of any length; see `Child.ask`.

    Raises:
        ConfigError: if obstore is not installed.
    """
    require_extra(url)
    return child().ask(call, url, *details, wait_s=None)


def end_child() -> None:
    """End the child; the next use starts another."""
    global _child
    if _child is not None:
        _child.end()
        _child = None


def _forget_in_fork() -> None:
    """Leave the child to the parent process: two processes would mix up their requests."""
    global _child
    if _child is not None:
        _child.forget()
        _child = None


os.register_at_fork(after_in_child=_forget_in_fork)


def is_of_this_user(connected: socket.socket) -> bool:
    """Return whether the other end of a connection is a process of this user."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())
