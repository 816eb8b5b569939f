"""What a load requests of a store: every byte once, in requests that neighbors share."""

from __future__ import annotations

import errno
import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from reprise.loading.loader import fill
from reprise.loading.reader import check_first_blocks, open_checkpoint, read_places
from reprise.stores.files import StoreFiles
from reprise.stores.location import location
from reprise.stores.ranges import KEPT_BYTES, WINDOW_BYTES, RangeMemory, Ranges, requests_of
from reprise.stores.reader import close_readers, reader_of
from reprise.stores.wire import SLOT_BYTES
from reprise.tensors.dtypes import torch_dtype
from tests.fakes import SHARDINGS
from tests.unit.reprise.loading.test_loader import SPECS, STATE_OF, save

BY_NAME = {sharding.name: sharding for sharding in SHARDINGS}
CONTENT = random.Random(0).randbytes(6 * WINDOW_BYTES + 17)


class Fetched:
    """An object that counts what is fetched of it."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def __call__(self, buffer: memoryview, offset: int) -> None:
        with self._lock:
            self.spans.append((offset, offset + buffer.nbytes))
        buffer[:] = CONTENT[offset : offset + buffer.nbytes]


def read(ranges: Ranges, fetched: Fetched, start: int, end: int) -> bytes:
    buffer = bytearray(end - start)
    ranges.fill(memoryview(buffer), start, fetched)
    return bytes(buffer)


# A thread that is ahead cuts the window of one that begins before it, so their number is bounded where one reads alone.
@pytest.mark.parametrize(("is_planned", "count", "most"), [(False, 1, 8), (False, 8, 80), (True, 8, 3)])
def test_threads_fetch_each_byte_once(*, is_planned: bool, count: int, most: int) -> None:
    generator, fetched = random.Random(1), Fetched()
    cuts = sorted(generator.sample(range(len(CONTENT)), 80))
    spans = list(itertools.pairwise([0, *cuts, len(CONTENT)]))
    ranges = Ranges(len(CONTENT), RangeMemory())
    assert read(ranges, fetched, 5, 90) == CONTENT[5:90]  # a part that a check has read before
    if is_planned:
        ranges.planned = list(requests_of(spans))
    with ThreadPoolExecutor(count) as threads:
        bodies = threads.map(lambda span: read(ranges, fetched, *span), spans)
        assert b"".join(bodies) == CONTENT
    fetches = sorted(fetched.spans)
    assert [start for start, _ in fetches] == [0, *(end for _, end in fetches[:-1])]
    assert len(fetches) <= most


def test_neighbors_share_a_request_and_gaps_are_not_read() -> None:
    assert list(requests_of([(0, 10), (10, 4096), (8000, 9000)])) == [(0, 9000, 3)]
    assert list(requests_of([(0, 10), (1 << 20, 2 << 20)])) == [(0, 10, 1), (1 << 20, 2 << 20, 1)]
    assert list(requests_of([(0, SLOT_BYTES), (SLOT_BYTES, SLOT_BYTES + 1)])) == [
        (0, SLOT_BYTES, 1),
        (SLOT_BYTES, SLOT_BYTES + 1, 1),
    ]
    columns = (0, 2 * SLOT_BYTES + 5)
    assert [request[:2] for request in requests_of([columns, columns])] == [
        (0, SLOT_BYTES),
        (SLOT_BYTES, 2 * SLOT_BYTES),
        (2 * SLOT_BYTES, 2 * SLOT_BYTES + 5),
    ]


def test_a_planned_request_is_forgotten_after_its_last_read() -> None:
    fetched, ranges = Fetched(), Ranges(len(CONTENT), RangeMemory())
    ranges.planned = list(requests_of([(0, 10), (10, 30)]))
    assert read(ranges, fetched, 0, 10) + read(ranges, fetched, 10, 30) == CONTENT[:30]
    assert fetched.spans == [(0, 30)]
    assert read(ranges, fetched, 0, 10) == CONTENT[:10]
    assert len(fetched.spans) == 2


def test_the_oldest_ranges_make_room() -> None:
    fetched, ranges = Fetched(), Ranges(len(CONTENT), RangeMemory(2 * WINDOW_BYTES))
    for number in (0, 1, 2, 1, 2, 0):
        read(ranges, fetched, number * WINDOW_BYTES, number * WINDOW_BYTES + 1)
    assert [start // WINDOW_BYTES for start, _ in fetched.spans] == [0, 1, 2, 0]
    assert KEPT_BYTES >= 8 * SLOT_BYTES


def test_a_failed_fetch_is_repeated_by_the_next_read() -> None:
    def failing(_buffer: memoryview, _offset: int) -> None:
        raise OSError(errno.EIO, "the store is down")

    ranges = Ranges(len(CONTENT), RangeMemory())
    with pytest.raises(OSError, match="down"):
        ranges.fill(memoryview(bytearray(10)), 0, failing)
    assert read(ranges, Fetched(), 0, 10) == CONTENT[:10]


@pytest.mark.parametrize(
    ("source", "target", "most"),
    [
        pytest.param("one rank", "one rank", 1.05, marks=pytest.mark.slow),
        pytest.param("columns over 2", "one rank", 1.1, marks=pytest.mark.slow),
        ("columns over 2", "columns over 2", 1.05),
        ("rows over 3", "rows and columns", 1.1),
        pytest.param("rows and columns", "2 replicas", 1.1, marks=pytest.mark.slow),
    ],
)
def test_a_load_reads_little_more_than_it_needs(source: str, target: str, most: float, tmp_path: Path) -> None:
    save(tmp_path, BY_NAME[source])
    path, sharding = location(f"file://{tmp_path / 'iter_0000010'}"), BY_NAME[target]
    ranks = range(sharding.world_size)
    empty = {spec.name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype)) for spec in SPECS}
    close_readers()  # one that an earlier test of the process has left counts its bytes too

    def load(rank: int) -> StoreFiles:
        files = StoreFiles(tmp_path.name if len(ranks) > 1 else None)
        checkpoint = open_checkpoint(path, files)
        places = read_places(checkpoint)
        if rank == 0:
            check_first_blocks(checkpoint, places)
        live, expected = (sharding.live(rank, SPECS, state) for state in (empty, STATE_OF))
        fill(checkpoint, places, live, threads=files.reading_threads)
        assert all(torch.equal(a.local, b.local) for a, b in zip(live, expected, strict=True))
        return files

    with ThreadPoolExecutor(len(ranks)) as threads:
        loads = list(threads.map(load, ranks))
    total_bytes = sum(file.stat().st_size for file in (tmp_path / "iter_0000010").rglob("*") if file.is_file())
    read_bytes = reader_of("file://").read_bytes
    for files in loads:
        files.end()
    assert total_bytes * 0.99 < read_bytes <= total_bytes * most
