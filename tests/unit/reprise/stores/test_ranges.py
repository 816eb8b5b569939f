"""What a load requests of a store: every cell once, which neighbors share."""

from __future__ import annotations

import itertools
import os
import random
from concurrent.futures import ThreadPoolExecutor
from errno import ENOSPC
from pathlib import Path

import pytest
import torch

from reprise.loading.blocks import check_first_blocks
from reprise.loading.loader import fill
from reprise.loading.reader import open_checkpoint
from reprise.storage.files import FILE_SYSTEM
from reprise.stores import child as child_module
from reprise.stores import ranges as ranges_module
from reprise.stores.child import Server
from reprise.stores.client import StoreClient
from reprise.stores.files import StoreFiles
from reprise.stores.locations import location
from reprise.stores.path import store_path
from reprise.stores.ranges import cell_at
from reprise.stores.store import Child
from reprise.tensors.dtypes import torch_dtype
from tests.fakes import SHARDINGS, sample_specs, sample_state, save_sample
from tests.profiles import slow
from tests.stores.saving import asking

Span = tuple[int, int]
BY_NAME = {sharding.name: sharding for sharding in SHARDINGS}
CONTENT = random.Random(0).randbytes(400_017)


class Fetching(Server):
    """A server of one object, which counts what is fetched of it."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[Span] = []

    def read(self, path: Path, offset: int, size: int, etag: str | None = None) -> memoryview:
        self.spans.append((offset, offset + size))
        return memoryview(CONTENT)[offset : offset + size]


def read(server: Server, span: Span, cell: Span | None = None) -> bytes:
    start, end = cell or span
    file = server.open(store_path("s3://bucket/x"), (len(CONTENT), None, 0.0), start, end - start)
    return os.pread(file.fileno(), span[1] - span[0], span[0] - start)


@pytest.mark.parametrize("room", [1 << 30, 40_000, 5_000])
def test_threads_fetch_each_byte_once_with_room(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FILE_SYSTEM, "free_bytes", lambda _: room)
    for module in (child_module, ranges_module):
        monkeypatch.setattr(module, "CELL_BYTES", 7777)
    monkeypatch.setattr(ranges_module, "FIRST_CELL_BYTES", 1000)
    generator, server = random.Random(1), Fetching()
    cuts, reads, size = sorted(generator.sample(range(len(CONTENT)), 80)), list[tuple[Span, Span]](), len(CONTENT)
    for start, end in itertools.pairwise([0, *cuts, size]):
        at = start
        while at < end:
            cell = cell_at(at, size)
            reads += 3 * [((at, min(end, cell[1])), cell)]  # three replicas
            at = cell[1]
    generator.shuffle(reads)
    with ThreadPoolExecutor(8) as threads:
        for (start, end), body in threads.map(lambda one: (one[0], read(server, *one)), reads):
            assert body == CONTENT[start:end]
    fetches = sorted(server.spans)
    assert sum(os.fstat(kept.result().fileno()).st_size for kept in server._ranges.values()) <= max(room, 7777)
    if room > size:
        assert fetches == [(0, 1000), *((at, min(size, at + 7777)) for at in range(1000, size, 7777))]


def test_the_newest_ranges_stay_and_the_oldest_are_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FILE_SYSTEM, "free_bytes", lambda _: 550)
    for module in (child_module, ranges_module):
        monkeypatch.setattr(module, "CELL_BYTES", 100)
    server, spans = Fetching(), list(itertools.pairwise(range(0, 1000, 100)))
    for span in [*spans, *spans[-5:], spans[0]]:
        assert read(server, span) == CONTENT[slice(*span)]
    assert server.spans == [*spans, spans[0]]


def test_a_full_disk_keeps_one_range_until_it_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> int:
        raise OSError(ENOSPC, "no room")

    server, first, second = Fetching(), (65536, 131072), (0, 65536)
    with monkeypatch.context() as patch:
        patch.setattr(child_module.tempfile, "TemporaryFile", refuse)
        for span in (first, second, first):
            with ThreadPoolExecutor(3) as threads:
                for body in threads.map(lambda _, span=span: read(server, span), range(9)):  # type: ignore[misc]
                    assert body == CONTENT[slice(*span)]
        assert server.spans == [first, second, first]
    for _ in range(2):
        assert read(server, second) == CONTENT[slice(*second)]
    assert server.spans == [first, second, first, second]


def test_a_cut_file_of_fetched_bytes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(CONTENT)
    server, files, body = Server(), StoreFiles(), memoryview(bytearray(2000))
    monkeypatch.setattr(Child, "ask", asking(server))
    number = files.open_for_reading(location(f"file://{tmp_path / 'x'}"))
    assert files.read(number, body, offset=0) == 2000
    (kept,) = server._ranges.values()
    os.ftruncate(kept.result().fileno(), 1000)
    with pytest.raises(OSError, match="ends early"):
        files.read(number, body, offset=0)


def test_without_a_folder_for_its_file_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(child_module.tempfile, "tempdir", str(tmp_path / "gone"))
    server, span = Fetching(), (0, 1000)
    with ThreadPoolExecutor(3) as threads:
        for body in threads.map(lambda _: read(server, span), range(3)):
            assert body == CONTENT[slice(*span)]


def test_a_failed_fetch_is_repeated_by_the_next_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> memoryview:
        raise MemoryError

    server = Fetching()
    with monkeypatch.context() as patch:
        patch.setattr(server, "read", failing)
        with pytest.raises(MemoryError):
            read(server, (0, 10))
    assert read(server, (0, 10)) == CONTENT[:10]


@pytest.mark.parametrize(
    ("source", "target", "most"),
    [
        ("columns over 2", "columns over 2", 1.05),
        ("rows over 3", "rows and columns", 1.1),
        slow("rows and columns", "2 replicas", 1.1),
    ],
)
def test_a_load_reads_little_more_than_it_needs(
    source: str, target: str, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sharding = location(f"file://{save_sample(tmp_path, BY_NAME[source])}"), BY_NAME[target]
    specs = sample_specs()
    ranks = range(sharding.world_size)
    empty = {spec.name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype)) for spec in specs}
    server, fetched = Server(), list[int]()

    def read(self: StoreClient, path: Path, offset: int, size: int, etag: str | None = None) -> memoryview:
        fetched.append(size)
        return read_object(self, path, offset, size, etag)

    read_object = StoreClient.read
    monkeypatch.setattr(StoreClient, "read", read)
    monkeypatch.setattr(Child, "ask", asking(server))

    def load(rank: int) -> StoreFiles:
        files = StoreFiles(tmp_path.name if len(ranks) > 1 else None)
        checkpoint = open_checkpoint(path, files)
        if rank == 0:
            check_first_blocks(checkpoint)
        live, expected = (sharding.live(rank, specs, state) for state in (empty, sample_state(specs, seed=7)))
        fill(checkpoint, live)
        assert all(torch.equal(a.local, b.local) for a, b in zip(live, expected, strict=True))
        return files

    loads = [load(rank) for rank in ranks]
    total_bytes = sum(file.stat().st_size for file in (tmp_path / "iter_0000010").rglob("*") if file.is_file())
    loads[0].end()
    assert total_bytes * 0.99 < sum(fetched) <= total_bytes * most
