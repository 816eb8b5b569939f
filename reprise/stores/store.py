"""This process's requests to object stores, which one child process per host makes.

obstore's threads do not survive a fork, and a program may fork after loading a checkpoint, as a DataLoader does. So the
program's child imports obstore, and the program never does. A load's ranks share a child, found by the load's name.
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
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, cast

from reprise.errors import CheckpointError
from reprise.stores.extra import require_extra
from reprise.stores.ranges import SLOT_BYTES
from reprise.stores.url import StoreUrl

if TYPE_CHECKING:
    from reprise.stores.client import StoreClient

_log = logging.getLogger(__name__)

CONNECTIONS = 16
_END_S = 5.0
_ANSWER_S = 300.0  # after which a living child counts as hung
_LONG_CALLS = ("put", "delete")  # of many requests: they take as long as they need
MOST_TRIES = 4


def start(module: str, *words: str, **settings: Any) -> subprocess.Popen[bytes]:
    """Start a module as a process with this program's packages, which an interrupt at a terminal does not reach."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", f"reprise.stores.{module}", *words],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
        **settings,
    )


class ChildLink:
    """A connection to a child process: one request at a time, with shared memory for an object's bytes."""

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
            OSError: The child is gone.
        """
        self.connection.send_bytes(json.dumps(request).encode())

    def answer(self, wait_s: float | None) -> Any:
        """Return the answer, or None if the child is gone or silent for too long."""
        with contextlib.suppress(OSError, EOFError):
            if self.connection.poll(wait_s):
                return json.loads(self.connection.recv_bytes())
        return None


class Child:
    """A child process, started at its first use. A dead or hung one is replaced, up to `MOST_TRIES` times per request.

    Args:
        name: The load whose ranks share it. Empty for this process alone.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._address = f"\0reprise-store-{os.getuid()}-{name or secrets.token_hex(8)}"
        self._idle: list[ChildLink] = []
        self.process: subprocess.Popen[bytes] | None = None

    def link(self) -> ChildLink:
        """Return a new connection."""
        while True:
            with socket.socket(socket.AF_UNIX) as connected, contextlib.suppress(ConnectionError):
                connected.connect(self._address)
                if not is_of_this_user(connected):
                    raise PermissionError(errno.EACCES, "a process of another user answered", "a store")
                return ChildLink(connected)
            with socket.socket(socket.AF_UNIX) as listener:
                try:
                    listener.bind(self._address)
                except OSError:  # another rank starts it
                    continue
                listener.listen(4096)
                if self.process is not None:
                    self.end()
                    _log.warning("the store reader process exited and is restarted")
                words, inherited = (str(listener.fileno()), str(os.getpid())), [listener.fileno()]
                self.process = start("child", *words, pass_fds=inherited, stdin=subprocess.DEVNULL)

    def ask(self, call: str, url: StoreUrl, *details: object, into: memoryview | None = None) -> Any:
        """Return a `StoreClient` call's result as a JSON value. An object's bytes go into the buffer `into`.

        Raises:
            OSError: See the `StoreClient` method.
            CheckpointError: The child has a defect.
        """
        for _ in range(MOST_TRIES):
            link, answer = self._idle.pop() if self._idle else self.link(), None
            try:
                link.send(call, url.root, url.key, *details)
                answer = link.answer(None if call in _LONG_CALLS else _ANSWER_S)
                if answer is not None and into is not None:
                    into[:] = memoryview(link.memory)[: into.nbytes]
            except ConnectionError:
                pass
            finally:
                if answer is None:  # a late answer would be mistaken for the next request's
                    link.connection.close()
                else:
                    self._idle.append(link)
            match answer:
                case ["error", number, text, where]:
                    raise OSError(number, text, where)
                case ["defect", text]:
                    raise CheckpointError("A store could not be read", where=url, found=text)
                case [result]:
                    return result
                case _:
                    if self.process is not None:
                        self.process.kill()  # if it has not ended, it is hung
        raise OSError(errno.EIO, f"the store reader process exited {MOST_TRIES} times", str(url))

    def forget(self) -> None:
        """Close this process's copies of the connections after a fork."""
        while self._idle:
            self._idle.pop().connection.close()

    def end(self) -> None:
        """Disconnect from the child, which ends once no rank uses it."""
        self.forget()
        if self.process is not None:
            try:
                self.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                if self.name:  # other ranks still use it
                    return
                self.process.kill()
                self.process.wait()


_child: Child | None = None


def child(load: str | None = None) -> Child:
    """Return this process's child or, given a load's name, the one that the load's ranks share."""
    global _child
    if _child is None or (load is not None and _child.name != load):
        end_child()
        _child = Child(load or "")
    return _child


def ask(call: str, url: StoreUrl, *details: object) -> Any:
    """Return a call's result from this process's child; see `Child.ask`.

    Raises:
        ConfigError: obstore is not installed.
    """
    require_extra(url)
    return child().ask(call, url, *details)


class _ChildClient:
    def __getattr__(self, call: str) -> Callable[..., Any]:
        return partial(ask, call)


# A client whose calls this process's child makes.
CHILD_CLIENT = cast("StoreClient", _ChildClient())


def end_child() -> None:
    """End the child. The next use starts another."""
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
    """Return whether a connection's other end belongs to this user."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())
