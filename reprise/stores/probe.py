"""Tests a store below a URL: writes, reads, response time, conditional creation."""

from __future__ import annotations

import contextlib
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from reprise.storage.paths import exists
from reprise.stores.files import StoreFiles
from reprise.stores.path import store_path
from reprise.stores.store import CHILD_CLIENT
from reprise.stores.url import StoreUrl

SPEED_BYTES = 64 << 20
_REQUESTS = 10
_TESTS = "objects can be written", "and read", "latency", "conditional creation"
_NOT_HONORED = "not honored: of two programs that create an object, each believes to be first"


class StoreFinding(NamedTuple):
    """A test's result. `is_fine` is None if the store is usable but lacks a feature."""

    what: str
    is_fine: bool | None
    found: str


def probe_store(text: str) -> list[StoreFinding]:
    """Test a store below a URL, leave nothing in it, and return the findings.

    Raises:
        ConfigError: The URL is malformed, or obstore is not installed.
    """
    folder, findings = StoreUrl.parse(text).child(f".doctor-{secrets.token_hex(4)}"), list[StoreFinding]()
    parents = Path("/", folder.key).parents if folder.root == "file://" else ()
    new_folders = [parent for parent in parents if not exists(parent)]
    try:
        for answer in _answers(folder.child("data"), folder.child("once")):
            is_fine = None if answer == _NOT_HONORED else True
            findings.append(StoreFinding(_TESTS[len(findings)], is_fine, answer))
    except OSError as error:
        findings.append(StoreFinding(_TESTS[len(findings)], False, f"{error.strerror}"))
    finally:
        with contextlib.suppress(OSError):
            CHILD_CLIENT.delete(folder, ["data", "once"])
            for parent in new_folders:
                os.rmdir(parent)
    return findings


def _answers(data: StoreUrl, once: StoreUrl) -> Iterator[str]:
    """Yield each test's answer."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(os.urandom(1 << 20) * (SPEED_BYTES >> 20))
        yield _speed(lambda: CHILD_CLIENT.put(data, file.name))
    files = StoreFiles()
    descriptor, buffer = files.open_for_reading(store_path(str(data))), memoryview(bytearray(SPEED_BYTES))
    yield f"{_speed(lambda: files.read(descriptor, buffer, offset=0))}, one request at a time"
    times = [1e3 * _seconds(lambda: CHILD_CLIENT.head(data)) for _ in range(_REQUESTS)]
    yield f"{statistics.median(times):.1f} ms, at most {max(times):.1f} ms"
    is_twice = CHILD_CLIENT.create(once, "first") and CHILD_CLIENT.create(once, "second")
    yield _NOT_HONORED if is_twice else "a second creation of an object is refused"


def _speed(call: Callable[[], object]) -> str:
    return f"{SPEED_BYTES / 1e6 / _seconds(call):.0f} MB/s"


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
