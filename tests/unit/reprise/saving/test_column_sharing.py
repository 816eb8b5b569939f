"""Ranks of one host put columns together in memory that they share: same files, few writes, and a way out for all."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from reprise.commit.attempt import Attempt, Hosts
from reprise.commit.shared_attempt import SharedAttempt
from reprise.errors import TrainerError
from reprise.format.layout import build_layout
from reprise.format.manifest import BLOCK_BYTES, Piece
from reprise.format.names import FORMAT, STATE
from reprise.loading.choose import LoadSource
from reprise.loading.restorer import Restorer
from reprise.ranks.channel import StoreChannel
from reprise.saving import column_sharing as sharing_module
from reprise.saving import plan as planning
from reprise.saving.checkpointer import Checkpointer
from reprise.saving.column_sharing import STRIPES_AT, LocalRanks, SharedMemory, Stripe, Stripes
from reprise.saving.plan import Plan
from reprise.saving.policy import SavePolicy, SaveReport
from reprise.storage.files import Files
from reprise.storage.folder import CheckpointFolder
from reprise.tensors.live import Contents
from tests.fakes import Axis, CountedReads, Sharding, all_ranks, run_ranks, sample_specs, sample_state
from tests.harness import tensor_files
from tests.profiles import examples

SPECS = sample_specs()
STATE_BYTES = sample_state(SPECS, seed=1)
COLUMNS = Sharding("columns over 2", (Axis("column", 2),))
ALONE = Sharding("one rank")
LIMITED = (planning, planning, sharing_module, sharing_module)
LIMITS = ("EXTENT_BYTES", "CHUNK_BYTES", "STRIPE_BYTES", "MAX_STRIPES")


@pytest.fixture(autouse=True)
def _strip_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing_module, "STRIPE_BYTES", 1 << 16)


class CountingFiles(Files):
    """A file system that counts the writes of all ranks."""

    def __init__(self) -> None:
        self.writes = Counter[int]()

    def write(self, descriptor: int, data: memoryview, *, offset: int) -> None:
        self.writes[threading.get_ident()] += 1
        super().write(descriptor, data, offset=offset)


def contents(sharding: Sharding, rank: int, iteration: int) -> Contents:
    live = sharding.live(rank, SPECS, STATE_BYTES)
    return Contents(tuple(SPECS), tuple(live), {}, {STATE: {"format": FORMAT, "iteration": iteration}})


Saved = list[SaveReport]


def save(
    folder: Path,
    sharding: Sharding,
    *,
    hosts: Sequence[Sequence[int]] = (),
    iterations: Sequence[int] = (1,),
    files: Callable[[int], Files] = lambda _: Files(),
    staging_bytes: Callable[[int], int | None] = lambda _: None,
    async_save: bool = False,
    store: Callable[[], Store] = HashStore,
) -> list[Saved]:
    """Save from all ranks, some of them on one host; return each rank's reports."""

    def run(channel: StoreChannel) -> Saved:
        policy = SavePolicy(folder, staging_bytes=staging_bytes(channel.rank), async_save=async_save)
        local_ranks = next((host for host in hosts if channel.rank in host), ())
        checkpointer = Checkpointer(policy, channel, nonce="n", files=files(channel.rank), local_ranks=local_ranks)
        checkpointer.start()
        found = [checkpointer.save(iteration, contents(sharding, channel.rank, iteration)) for iteration in iterations]
        checkpointer.wait()
        found += checkpointer.reports()
        checkpointer.close()
        return [report for report in found if report is not None]

    return all_ranks(max(sharding.world_size, 1), run, store=store)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of one rank."""
    folder = tmp_path_factory.mktemp("alone")
    save(folder, ALONE)
    return tensor_files(folder / "iter_0000001")


def assert_saved(saved: list[Saved]) -> None:
    for reports in saved:
        for report in reports:
            assert report.error is None, str(report.error)


@st.composite
def hosts_of(draw: st.DrawFn) -> tuple[Sharding, list[list[int]]]:
    """Return a way to cut every tensor over ranks, and which of the ranks are on which host."""
    axes = st.builds(Axis, st.sampled_from(["replica", "row", "column", "column", "strided row"]), st.integers(2, 3))
    sharding = Sharding("drawn", tuple(draw(st.lists(axes, max_size=2))))
    hosts: list[list[int]] = [[], [], []]
    for rank in range(sharding.world_size):
        hosts[draw(st.sampled_from([0, 0, 1, 2]))].append(rank)
    return sharding, [host for host in hosts if host]


SIZES = st.sampled_from([1 << 14, 1 << 16, 1 << 22])


@given(hosts_of(), hosts_of(), st.booleans(), st.tuples(SIZES, SIZES, SIZES, st.sampled_from([1, 1 << 16])))
@examples(60)
def test_any_ranks_write_the_files_of_one_rank_and_load_them(
    expected: dict[str, bytes],
    saving: tuple[Sharding, list[list[int]]],
    loading: tuple[Sharding, list[list[int]]],
    async_save: bool,
    sizes: tuple[int, int, int, int],
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        for module, limit, size in zip(LIMITED, LIMITS, sizes, strict=True):
            patch.setattr(module, limit, size)
        assert_saved(save(Path(name), saving[0], hosts=saving[1], iterations=(1, 2), async_save=async_save))
        for iteration in (1, 2):
            assert tensor_files(Path(name) / f"iter_{iteration:07d}") == expected
        all_ranks(loading[0].world_size, partial(load, Path(name), saving[0], loading[0]))


def load(folder: Path, saving: Sharding, sharding: Sharding, channel: StoreChannel) -> None:
    """Load the newest checkpoint, checked block by block; compare what this rank gets, and how much it reads for it."""
    empty = {name: torch.zeros_like(value) for name, value in STATE_BYTES.items()}
    live = sharding.live(channel.rank, SPECS, empty)
    files = CountedReads()
    restorer = Restorer(channel, nonce="n", files=files)
    restorer.restore(LoadSource(folder), check=lambda _: None, live=lambda _: live, is_new=True)
    for tensor, original in zip(live, sharding.live(channel.rank, SPECS, STATE_BYTES), strict=True):
        assert torch.equal(tensor.local, original.local), tensor.spec.name
    own = sum(tensor.local.nbytes for tensor in live)
    if all(axis.role != "column" for axis in (*saving.axes, *sharding.axes)):
        assert files.read_bytes <= own + 2 * len(SPECS) * BLOCK_BYTES


@pytest.mark.parametrize(
    ("hosts", "rank_1_bytes", "is_by_row"),
    [([[0, 1]], None, False), ([], None, True), ([[0, 1]], 1000, True), ([[0, 1]], 10 << 20, False)],
)
def test_ranks_with_memory_for_it_write_no_row_by_itself(
    tmp_path: Path, expected: dict[str, bytes], hosts: list[list[int]], rank_1_bytes: int | None, is_by_row: bool
) -> None:
    counted = CountingFiles()
    limits = (None, rank_1_bytes)
    assert_saved(save(tmp_path, COLUMNS, hosts=hosts, files=lambda _: counted, staging_bytes=limits.__getitem__))
    # 2402 rows of the embedding and 2402 of its moment; in stripes of 64 KiB, at most three writes for each.
    assert (counted.writes.total() > 4800) == is_by_row
    assert is_by_row or counted.writes.total() < 3 * (4_804_000 + 480_400) // (1 << 16) + 60
    assert tensor_files(tmp_path / "iter_0000001") == expected


def raising(code: int) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def losing_one() -> Callable[..., Any]:
    """Return a way to claim strips by which the first is written by nobody."""
    claim, lost = SharedMemory.claim, list[Stripe]()

    def lose(memory: SharedMemory, stripe: Stripe) -> memoryview | None:
        data = claim(memory, stripe)
        if data is None or lost:
            return data
        lost.append(stripe)
        return None

    return lose


@pytest.mark.parametrize(
    ("owner", "name", "fault", "words"),
    [
        (os, "posix_fallocate", raising(errno.ENOMEM), None),
        (SharedMemory, "open", staticmethod(lambda _: None), "the memory of rank 0"),
        (SharedMemory, "claim", losing_one(), "every byte once"),
        (os, "memfd_create", raising(errno.ENOSYS), None),
        (sharing_module, "machine", lambda *_: str(threading.get_ident()), None),  # other hosts
    ],
)
def test_without_shared_memory_nothing_is_lost_but_a_save(
    tmp_path: Path,
    expected: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    fault: Callable[..., Any],
    words: str | None,
) -> None:
    monkeypatch.setattr(owner, name, fault)
    for first, second in save(tmp_path, COLUMNS, hosts=[[0, 1]], iterations=(1, 2)):
        assert first.error is None if words is None else words in str(first.error)
        assert second.error is None
    assert (tmp_path / "iter_0000001").exists() == (words is None)
    assert tensor_files(tmp_path / "iter_0000002") == expected


def test_saves_leave_no_descriptor_and_no_key_behind(tmp_path: Path) -> None:
    def keys_after(saves: int) -> int:
        store, iterations = HashStore(), range(1, saves + 1)
        folder = tmp_path / str(saves)
        assert_saved(save(folder, COLUMNS, hosts=[[0, 1]], iterations=iterations, store=lambda: store))
        # Every save has deleted its messages on the columns.
        assert not any(store.check([f"save/n-{number}/stripes/{rank}"]) for number in iterations for rank in (0, 1))
        return int(store.num_keys())

    first = keys_after(2)
    before = len(os.listdir("/proc/self/fd"))
    assert keys_after(6) == first
    assert len(os.listdir("/proc/self/fd")) <= before


def joined(
    local_ranks: LocalRanks,
    channel: StoreChannel,
    folder: Path,
    pieces: Sequence[Piece] = (),
    *,
    may_share: bool = True,
) -> Stripes:
    attempt = Attempt(1, "n-1", CheckpointFolder(folder, Files()), build_layout(SPECS, file_bytes=1 << 20))
    shared = SharedAttempt(attempt.name, channel, Hosts.of(channel.ranks))
    return local_ranks.join(shared, attempt.layout, pieces, may_share=may_share)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_that_says_nothing_is_given_up_by_name(tmp_path: Path, silent: int) -> None:
    def run(channel: StoreChannel) -> None:
        if channel.rank != silent:
            joined(LocalRanks(channel, [0, 1]), channel, tmp_path)

    outcome = run_ranks(2, run, timeout_s=0.3)[1 - silent]
    assert isinstance(outcome, TrainerError)
    assert f"rank {silent}" in str(outcome)


def test_a_rank_alone_on_its_host_waits_for_no_other(tmp_path: Path) -> None:
    """With LOCAL_RANK but without LOCAL_WORLD_SIZE, a launch names another rank as the one on the host."""
    channel = StoreChannel(HashStore(), 1, world_size=2, timeout_s=0.01)
    assert joined(LocalRanks(channel, [0]), channel, tmp_path) == {}


ALL = (0, 1, 2)


@pytest.mark.parametrize(
    ("claims", "with_columns", "may_share", "shares"),
    [
        ((ALL, ALL, ALL), (0, 1), ALL, True),
        ((ALL, ALL, ALL), (), ALL, False),
        *(((ALL, ALL, ALL), (0, 1), {*ALL} - {rank}, False) for rank in ALL),
        (((0, 1), (1,), (2,)), ALL, ALL, False),
        (((0,), (0, 1), (2,)), ALL, ALL, False),
        (((0, 1), ALL, ALL), ALL, ALL, False),
    ],
)
def test_ranks_share_all_columns_or_none(
    tmp_path: Path,
    claims: Sequence[Sequence[int]],
    with_columns: Collection[int],
    may_share: Collection[int],
    shares: bool,
) -> None:
    """They share nothing if a rank has no memory for it, or they do not agree on who is on their host."""

    def run(channel: StoreChannel) -> int:
        pieces = columns_on(COLUMNS, channel.rank) if channel.rank in with_columns else []
        local_ranks = LocalRanks(channel, claims[channel.rank])
        stripes = joined(local_ranks, channel, tmp_path, pieces, may_share=channel.rank in may_share)
        return len(stripes.get("embedding", ()))

    counts = all_ranks(3, run)
    assert counts == [counts[0]] * 3
    assert (counts[0] > 50) == shares


def columns_on(sharding: Sharding, rank: int) -> list[Piece]:
    """Return the pieces of a rank that have rows apart."""
    if rank >= sharding.world_size:
        return []
    return Plan(contents(sharding, rank, 1), SavePolicy(Path(), file_bytes=1 << 20), rank).columns


def test_memory_is_taken_by_address_only_while_unchanged() -> None:
    first = SharedMemory.make()
    assert SharedMemory.open(first.address) is not None
    path, _, name = first.address.partition(" ")
    assert SharedMemory.open(f"{path} {name}x") is None
    assert SharedMemory.open(f"/proc/999999999/fd/3 {name}") is None
    reader, writer = os.pipe()  # what another container's process has under that number
    assert SharedMemory.open(f"/proc/self/fd/{reader} {name}") is None
    os.close(reader)
    os.close(writer)
    first.close()


def test_a_full_strip_goes_to_one_of_those_that_claim_it() -> None:
    memory = SharedMemory.make(STRIPES_AT + 4096)
    stripe = Stripe(memory, 3, 0, 4096, STRIPES_AT)
    others = [SharedMemory.open(memory.address) for _ in range(3)]
    claims: list[memoryview] = []
    start = threading.Barrier(8)

    def claim(number: int) -> None:
        mine = others[number % 3]
        assert mine is not None
        start.wait()
        for _ in range(200):
            if (found := mine.claim(stripe)) is not None:
                claims.append(found)

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(8)]
    memory._counters[stripe.number] = 4096
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claims) == 1
    assert memory.claim(stripe) is None
