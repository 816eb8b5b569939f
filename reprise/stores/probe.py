"""Tries what a store can do below a URL: write, read, answer fast, refuse a second creation."""

from __future__ import annotations

import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reprise.stores.store import Store
from reprise.stores.url import StoreUrl

if TYPE_CHECKING:
    from reprise.stores.client import StoreClient

SPEED_BYTES = 64 << 20
_READ_BYTES = 8 << 20
_REQUESTS = 10


@dataclass(frozen=True, slots=True)
class StoreFinding:
    """The result of one try: `is_fine` is None where the store is usable but lacks something."""

    what: str
    is_fine: bool | None
    found: str


def probe_store(text: str) -> list[StoreFinding]:
    """Return what a store can do below a URL.

    Raises:
        ConfigError: if the URL is malformed, or obstore is not installed.
    """
    url = StoreUrl.parse(text)
    return [StoreFinding(*row) for row in Store(url.root).ask("probe", url.key)]


def probe(url: StoreUrl, client: StoreClient, *, size: int = SPEED_BYTES) -> Iterator[StoreFinding]:
    """Yield what the tries find, and leave nothing in the store.

    Args:
        size: of the object to write and read, in bytes.
    """
    folder = url.child(f".doctor-{secrets.token_hex(4)}")
    try:
        for what, look in (
            ("objects can be written", _write),
            ("and read", _read),
            ("latency", _latency),
            ("conditional creation", _creation),
        ):
            try:
                is_fine, text = look(client, folder, size)
            except OSError as error:
                yield StoreFinding(what, False, f"{error.strerror}")
                return
            yield StoreFinding(what, is_fine, text)
    finally:
        try:
            client.delete([entry.key for entry in client.objects(folder.key)])
        except OSError as error:
            yield StoreFinding("what was written is deleted", False, f"{error.strerror}")


def _write(client: StoreClient, folder: StoreUrl, size: int) -> tuple[bool | None, str]:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "data"
        path.write_bytes(os.urandom(1 << 20) * (size >> 20))
        start = time.perf_counter()
        client.put_file(folder.child("data").key, path)
    return True, _speed(size, time.perf_counter() - start)


def _read(client: StoreClient, folder: StoreUrl, size: int) -> tuple[bool | None, str]:
    start = time.perf_counter()
    for offset in range(0, size, _READ_BYTES):
        client.read(folder.child("data").key, offset, min(_READ_BYTES, size - offset))
    return True, f"{_speed(size, time.perf_counter() - start)}, one request at a time"


def _latency(client: StoreClient, folder: StoreUrl, size: int) -> tuple[bool | None, str]:
    seconds = []
    for _ in range(_REQUESTS):
        start = time.perf_counter()
        client.head(folder.child("data").key)
        seconds.append(time.perf_counter() - start)
    return True, f"{1e3 * statistics.median(seconds):.1f} ms, at most {1e3 * max(seconds):.1f} ms"


def _creation(client: StoreClient, folder: StoreUrl, size: int) -> tuple[bool | None, str]:
    if client.honors_create(folder.key):
        return True, "a second creation of an object is refused"
    return None, "not honored: of two programs that create an object, each believes to be first"


def _speed(size: int, seconds: float) -> str:
    return f"{size / 1e6 / seconds:.0f} MB/s"
