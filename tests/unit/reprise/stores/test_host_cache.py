"""The cache of a host: every byte is fetched once, and bytes are those of the object."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import threading
from pathlib import Path

import pytest

from reprise.stores import host_cache
from reprise.stores.host_cache import CELL_BYTES, HostCache

SIZE = 11 * CELL_BYTES + 123
CONTENT = random.Random(0).randbytes(SIZE)


class Fetched:
    """An object of a store that counts what is fetched of it."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def __call__(self, buffer: memoryview, offset: int) -> None:
        with self._lock:
            self.ranges.append((offset, offset + buffer.nbytes))
        buffer[:] = CONTENT[offset : offset + buffer.nbytes]


def read(cache: HostCache, fetched: Fetched, start: int, end: int) -> bytes:
    opened, buffer = cache.open("run/x.safetensors", SIZE), bytearray(end - start)
    opened.read(memoryview(buffer), start, fetched)
    opened.close()
    return bytes(buffer)


def test_reads_of_several_threads_fetch_each_byte_once(tmp_path: Path) -> None:
    cache, fetched, generator = HostCache("a", tmp_path), Fetched(), random.Random(1)
    spans = [sorted(generator.sample(range(SIZE + 1), 2)) for _ in range(200)]
    problems = list[tuple[int, int]]()

    def run(spans: list[list[int]]) -> None:
        problems.extend((a, b) for a, b in spans if read(cache, fetched, a, b) != CONTENT[a:b])

    threads = [threading.Thread(target=run, args=(spans[number::4],)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    ranges = sorted(fetched.ranges)
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(ranges))
    cache.close()
    assert list(tmp_path.iterdir()) == []


def test_a_range_is_fetched_with_the_rest_of_its_cells_alone(tmp_path: Path) -> None:
    cache, fetched = HostCache("a", tmp_path), Fetched()
    assert read(cache, fetched, 5, CELL_BYTES + 1) == CONTENT[5 : CELL_BYTES + 1]
    assert read(cache, fetched, SIZE - 1, SIZE) == CONTENT[-1:]
    assert fetched.ranges == [(0, 2 * CELL_BYTES), (11 * CELL_BYTES, SIZE)]
    cache.close()


def test_the_folder_of_a_killed_load_is_removed_by_the_next(tmp_path: Path) -> None:
    alive = HostCache("alive", tmp_path)
    dead = tmp_path / alive.folder.name.replace("alive", "dead")
    dead.mkdir()
    (dead / "users.lock").touch()
    (dead / "x.data").write_bytes(b"x")
    HostCache("b", tmp_path).close()
    assert list(tmp_path.iterdir()) == [alive.folder]
    alive.close()


def test_a_folder_that_a_sweep_removes_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, sweeps = fcntl.flock, [tmp_path]

    def late(descriptor: int, kind: int) -> None:
        if kind == fcntl.LOCK_SH and sweeps:
            HostCache("b", sweeps.pop()).close()
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    cache = HostCache("a", tmp_path)
    assert read(cache, Fetched(), 0, SIZE) == CONTENT
    cache.close()


def test_a_failed_fetch_leaves_its_cells_to_the_next_reader(tmp_path: Path) -> None:
    cache = HostCache("a", tmp_path)

    def failing(_buffer: memoryview, _offset: int) -> None:
        raise OSError(errno.EIO, "the store is down")

    opened = cache.open("run/" * 100 + "x", SIZE)  # a key may be longer than a name of a file
    with pytest.raises(OSError, match="down"):
        opened.read(memoryview(bytearray(10)), 0, failing)
    opened.read(memoryview(buffer := bytearray(10)), 0, Fetched())
    assert bytes(buffer) == CONTENT[:10]
    opened.close()
    cache.close()


def test_a_full_disk_or_a_folder_that_shows_no_names_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "listdir", fail)
    cache, fetched = HostCache("a", tmp_path), Fetched()
    monkeypatch.setattr(host_cache.os, "pwritev", fail)
    assert read(cache, fetched, 3, 10) == CONTENT[3:10]
    assert fetched.ranges[-1] == (3, 10)
    cache.close()


def test_the_last_rank_removes_the_folder(tmp_path: Path) -> None:
    fetched, caches = Fetched(), [HostCache("a", tmp_path) for _ in range(2)]
    caches[0].close()
    assert read(caches[1], fetched, 0, SIZE) == CONTENT
    caches[1].close()
    assert list(tmp_path.iterdir()) == []
