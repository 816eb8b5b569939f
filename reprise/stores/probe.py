"""Tests a store below a URL: writes, reads, response time, conditional creation."""

from __future__ import annotations

import contextlib
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from reprise.stores.store import ask
from reprise.stores.url import StoreUrl

if TYPE_CHECKING:
    from reprise.stores.client import StoreClient

SPEED_BYTES = 64 << 20
_READ_BYTES = 8 << 20
_REQUESTS = 10
_NOT_HONORED = "not honored: of two programs that create an object, each believes to be first"


class StoreFinding(NamedTuple):
    """A test's result. `is_fine` is None if the store is usable but lacks a feature."""

    what: str
    is_fine: bool | None
    found: str


def probe_store(text: str) -> list[StoreFinding]:
    """Test a store below a URL, and return the findings.

    Raises:
        ConfigError: The URL is malformed, or obstore is not installed.
    """
    return [StoreFinding(*row) for row in ask(StoreUrl.parse(text), "probe")]


def probe(url: StoreUrl, client: StoreClient, *, size: int = SPEED_BYTES) -> Iterator[StoreFinding]:
    """Yield the findings, and leave nothing in the store.

    Args:
        size: The test object's size in bytes.
    """
    folder = url.child(f".doctor-{secrets.token_hex(4)}")
    key, once = folder.child("data").key, folder.child("once").key
    new = client.new_folder(folder.key)

    def write() -> str:
        with tempfile.NamedTemporaryFile() as file:
            file.write(os.urandom(1 << 20) * (size >> 20))
            file.flush()
            return f"{size / 1e6 / sum(_seconds(lambda _: client.put(key, Path(file.name)))):.0f} MB/s"

    def read() -> str:
        starts = range(0, size, _READ_BYTES)
        seconds = sum(_seconds(lambda start: client.read(key, start, min(_READ_BYTES, size - start)), starts))
        return f"{size / 1e6 / seconds:.0f} MB/s, one request at a time"

    def wait() -> str:
        times = _seconds(lambda _: client.head(key), range(_REQUESTS))
        return f"{1e3 * statistics.median(times):.1f} ms, at most {1e3 * max(times):.1f} ms"

    def create() -> str:
        is_twice = client.create(once, b"first") and client.create(once, b"second")
        return _NOT_HONORED if is_twice else "a second creation of an object is refused"

    tries = {"objects can be written": write, "and read": read, "latency": wait, "conditional creation": create}
    try:
        for what, attempt in tries.items():
            answer = attempt()
            yield StoreFinding(what, None if answer == _NOT_HONORED else True, answer)
    except OSError as error:
        yield StoreFinding(what, False, f"{error.strerror}")
    finally:
        with contextlib.suppress(OSError):
            client.delete([key, once], within=new)


def _seconds(call: Callable[[int], object], values: Iterable[int] = (0,)) -> list[float]:
    """Return how long a call takes with each value, in seconds."""
    times = []
    for value in values:
        start = time.perf_counter()
        call(value)
        times.append(time.perf_counter() - start)
    return times
