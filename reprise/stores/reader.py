"""Reads a store through a process of its own: the calling process may fork."""

from __future__ import annotations

import atexit
import errno
import json
import logging
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
from typing import Any

from reprise.errors import CheckpointError
from reprise.stores.child import child_environment
from reprise.stores.extra import require_extra
from reprise.stores.url import StoreUrl
from reprise.stores.wire import CONNECTIONS, SLOT_BYTES, Message, receive, send

_log = logging.getLogger(__name__)

# obstore tries a request again for two minutes, and a body takes its time; a process that hangs is given up.
_ANSWER_S = 300.0
_END_S = 5.0
MOST_RESTARTS = 3  # of the process of a load


class _Connection:
    """One request at a time to the reading process."""

    def __init__(self, connection: socket.socket, memory: memoryview) -> None:
        self._socket, self.memory = connection, memory
        self.read_bytes = 0
        connection.settimeout(_ANSWER_S)

    def call(self, message: Message) -> Message | None:
        """Return the answer to a request; None where the process is gone."""
        is_answered = False
        try:
            send(self._socket, message)
            answer = receive(self._socket)
            is_answered = True
            return answer
        except OSError:
            return None
        finally:
            if not is_answered:  # an answer still to come would be taken for that to the next request
                self._socket.close()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class _Process:
    """A process that reads a store, with its connections and the memory that both share.

    Args:
        root: the store, as in `StoreUrl.root`.
    """

    def __init__(self, root: str) -> None:
        self._memory = os.memfd_create("reprise-store", os.MFD_CLOEXEC)
        os.ftruncate(self._memory, CONNECTIONS * SLOT_BYTES)
        self._map = mmap.mmap(self._memory, CONNECTIONS * SLOT_BYTES)
        pairs = [socket.socketpair() for _ in range(CONNECTIONS)]
        descriptors = [served.fileno() for _, served in pairs]
        start = json.dumps([root, os.getpid(), self._memory, descriptors])
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "reprise.stores.serve", start],
            pass_fds=[self._memory, *descriptors],
            stdin=subprocess.DEVNULL,
            env=child_environment(),
            start_new_session=True,  # an interrupt of the terminal is for the program
        )
        whole = memoryview(self._map)
        self._connections = [
            _Connection(ours, whole[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES])
            for slot, (ours, _) in enumerate(pairs)
        ]
        for _, served in pairs:
            served.close()
        self.idle: queue.SimpleQueue[_Connection] = queue.SimpleQueue()
        for connection in self._connections:
            self.idle.put(connection)

    @property
    def read_bytes(self) -> int:
        """Return how many bytes of objects were read."""
        return sum(connection.read_bytes for connection in self._connections)

    def end(self) -> None:
        """End the process."""
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def forget(self) -> None:
        """Close this process's ends of the connections, which a fork has copied."""
        for connection in self._connections:
            connection.memory.release()
            connection.close()
        os.close(self._memory)


class StoreReader:
    """Reads one store. Threads may call it at once; `CONNECTIONS` requests are then under way.

    A process that dies, or hangs in a request, is replaced up to `MOST_RESTARTS` times.

    Args:
        root: the store, as in `StoreUrl.root`.

    Raises:
        ConfigError: if obstore is not installed.
    """

    def __init__(self, root: str) -> None:
        require_extra(root)
        self.root = root
        self._lock = threading.Lock()
        self._processes = [_Process(root)]

    @property
    def process_id(self) -> int:
        """Return the id of the process that reads."""
        return self._processes[-1].process.pid

    def read(self, key: str, buffer: memoryview, offset: int, etag: str | None) -> None:
        """Fill `buffer` from `offset` of an object.

        Raises:
            OSError: as `StoreClient.read`.
        """
        for start in range(0, buffer.nbytes, SLOT_BYTES):
            part = buffer[start : start + SLOT_BYTES]
            request = {"call": "read", "key": key, "offset": offset + start, "size": part.nbytes, "etag": etag}
            self._ask(request, part)

    @property
    def read_bytes(self) -> int:
        """Return how many bytes of objects were read."""
        return sum(process.read_bytes for process in self._processes)

    def head(self, key: str) -> tuple[int, str | None, float]:
        """Return the size of an object in bytes, its version, and when it was written, in Unix time.

        Raises:
            OSError: as `StoreClient.head`.
        """
        size, etag, modified_at = self.ask("head", key)
        return size, etag, modified_at

    def ask(self, call: str, key: str, **details: str) -> Any:
        """Return the answer to a request.

        Raises:
            OSError: as the method of `StoreClient`.
        """
        return self._ask({"call": call, "key": key, **details})

    def _ask(self, request: Message, into: memoryview | None = None) -> Any:
        """Return the answer to a request, whose bytes of an object go into a buffer."""
        while True:
            process = self._processes[-1]
            connection = process.idle.get()
            try:
                answer = connection.call(request)
                if answer is not None:
                    result = self._result(answer)
                    if into is not None:
                        into[:] = connection.memory[: into.nbytes]
                        connection.read_bytes += into.nbytes
                    return result
            finally:
                process.idle.put(connection)
            self._replace(process, request["key"])

    def _result(self, answer: Message) -> Any:
        if "defect" in answer:
            raise CheckpointError("A store could not be read", where=self.root, found=answer["defect"])
        if "errno" in answer:
            raise OSError(answer["errno"], answer["text"], answer["where"])
        return answer["result"]

    def _replace(self, process: _Process, key: str) -> None:
        """Start another process in the place of a dead one, once for all threads.

        Raises:
            OSError: after `MOST_RESTARTS`.
        """
        with self._lock:
            if process is not self._processes[-1]:
                return
            if len(self._processes) > MOST_RESTARTS:
                raise OSError(
                    errno.EIO,
                    f"the process that reads the store has ended {MOST_RESTARTS + 1} times",
                    str(StoreUrl(self.root, key)),
                )
            process.process.kill()
            process.process.wait()
            status = process.process.returncode
            _log.warning("the process that reads %s ended with status %d and is started again", self.root, status)
            self._processes.append(_Process(self.root))

    def close(self) -> None:
        """End the process."""
        self.forget()
        for process in self._processes:
            process.end()

    def forget(self) -> None:
        """Close this process's ends of the connections, which a fork has copied."""
        for process in self._processes:
            process.forget()


_readers: dict[str, StoreReader] = {}
_lock = threading.Lock()


def reader_of(root: str) -> StoreReader:
    """Return the reader of a store, which is started at its first use.

    Raises:
        ConfigError: as `StoreReader`.
    """
    with _lock:
        if root not in _readers:
            if not _readers:
                atexit.register(close_readers)
            _readers[root] = StoreReader(root)
        return _readers[root]


def close_readers() -> None:
    """End the reader processes; the next use starts new ones."""
    with _lock:
        while _readers:
            reader = _readers.popitem()[1]
            reader.close()
            if reader.read_bytes:
                _log.info("read %d bytes of %s", reader.read_bytes, reader.root)


def _forget_in_child() -> None:
    """Leave the readers to the parent process: two processes would mix up their requests."""
    global _lock
    _lock = threading.Lock()
    while _readers:
        _readers.popitem()[1].forget()


os.register_at_fork(after_in_child=_forget_in_child)
