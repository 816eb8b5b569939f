"""Messages between ranks that are threads, over one real store."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from reprise.errors import CheckpointError, LaunchError, LockError, MismatchError, TrainerError, UnreadableError
from reprise.ranks.channel import StoreChannel, single_rank_channel
from tests.fakes import JOIN_S, all_ranks, run_ranks, tcp_store
from tests.messages import refused

LARGE = (9 << 20) + 5  # several chunks


@pytest.mark.parametrize("size", [0, 5, LARGE])
def test_a_message_arrives_whole_and_leaves_no_key(size: int) -> None:
    data, store = os.urandom(size), tcp_store()

    def call(channel: StoreChannel) -> list[bytes]:
        if channel.rank == 0:
            channel.send("k", data)
        messages = channel.read_all("k", [0])
        messages.append(channel.broadcast("all", data if channel.rank == 0 else None))
        channel.agree("all have read it", None)
        return messages

    before = int(store.num_keys())
    assert all_ranks(2, call, store=lambda: store) == [[data, data]] * 2
    assert int(store.num_keys()) == before + 1  # the last decision


class CountingStore(dist.HashStore):  # type: ignore[misc]
    """A store that counts its calls by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __getattribute__(self, name: str) -> object:
        if name in ("check", "get", "multi_get", "set", "compare_set", "delete_key"):
            self.counts[name] += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize(("size", "chunks"), [(5, 0), (LARGE, 3)])
def test_a_message_asks_the_store_no_more_than_it_must(size: int, chunks: int) -> None:
    store = CountingStore()
    channel = StoreChannel(store, 0, world_size=1, timeout_s=5.0)
    names = channel.put("k", bytes(size))
    assert store.counts == Counter(compare_set=1, set=chunks)
    store.counts.clear()
    assert channel.read_all("k", [0]) == [bytes(size)]
    assert store.counts == Counter(check=1, multi_get=1, get=chunks)
    store.counts.clear()
    channel.delete(names)
    assert store.counts == Counter(delete_key=1 + chunks)


def test_a_later_message_replaces_the_first_only_if_published() -> None:
    channel = single_rank_channel()
    assert channel.published("heartbeat", 0) == ""
    for count in range(3):
        channel.publish("heartbeat", f"{count}")
    assert channel.clone().published("heartbeat", 0) == "2"
    channel.put("k", b"first")
    channel.put("k", b"second", is_first=False)
    assert channel.read_all("k", [0]) == [b"first"]
    with refused(LaunchError, "k/0"):
        channel.put("k", b"third")


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_ranks_gather_and_hear_the_first(world_size: int) -> None:
    calls: list[int] = []

    def call(channel: StoreChannel) -> tuple[list[bytes], object]:
        def make() -> object:
            calls.append(channel.rank)
            return {"path": "a\ud800", "pair": (1, None)}

        return channel.gather("k", f"from {channel.rank}".encode()), channel.from_first("first", make)

    gathered = [f"from {rank}".encode() for rank in range(world_size)]
    told = {"path": "a\ud800", "pair": [1, None]}
    assert all_ranks(world_size, call, store=tcp_store) == [
        (gathered if rank == 0 else [], told) for rank in range(world_size)
    ]
    assert calls == [0]


@pytest.mark.parametrize(
    ("door", "culprit", "kind"),
    [
        ("agree", 0, MismatchError),
        ("agree", 1, LockError),
        ("agree", 2, LaunchError),
        ("from_first", 0, UnreadableError),
        ("from_first", 0, CheckpointError),
    ],
)
def test_what_one_rank_raises_all_ranks_raise(door: str, culprit: int, kind: type[TrainerError]) -> None:
    def call(channel: StoreChannel) -> None:
        is_culprit, error = channel.rank == culprit, kind("The disk is gone")

        def fail() -> None:
            raise error

        channel.agree("before", None)
        if door == "agree":
            channel.agree("k", error if is_culprit else None)
        else:
            channel.from_first("k", fail)

    errors = run_ranks(3, call, store=tcp_store)
    assert [type(error) for error in errors] == [kind] * 3
    prefixes = ["" if rank == culprit else f"Rank {culprit}: " for rank in range(3)]
    assert [str(error) for error in errors] == [f"{prefix}The disk is gone." for prefix in prefixes]
    assert all(isinstance(error, TrainerError) and error.is_known_to_all for error in errors)


@pytest.mark.parametrize("culprits", [(), (0,), (2,), (1, 2)])
def test_parts_are_joined_unless_a_rank_has_a_problem(culprits: tuple[int, ...]) -> None:
    joined, problems = list[list[object]](), [MismatchError(f"No part of {rank}") for rank in range(3)]

    def call(channel: StoreChannel) -> object:
        def join(parts: list[object]) -> object:
            joined.append(parts)
            return {"parts": parts}

        problem = problems[channel.rank] if channel.rank in culprits else None
        return channel.join("k", (channel.rank, None), join, problem=problem)

    outcomes = run_ranks(3, call, store=tcp_store)
    parts = [[rank, None] for rank in range(3)]
    if not culprits:
        assert outcomes == [{"parts": parts}] * 3
        assert joined == [parts]
        return
    assert joined == []
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, MismatchError)
        assert outcome.is_known_to_all
        if rank in culprits:
            assert outcome is problems[rank]
        else:
            assert str(outcome) == f"Rank {culprits[0]}: No part of {culprits[0]}."


def test_a_rank_alone_raises_the_problem_itself() -> None:
    problem = CheckpointError("No")
    single_rank_channel().agree("k", None)
    with pytest.raises(CheckpointError) as caught:
        single_rank_channel().agree("k", problem)
    assert caught.value is problem


def test_a_defect_of_the_first_ends_every_rank() -> None:
    own, told = run_ranks(2, lambda channel: channel.from_first("k", lambda: 1 // 0), store=tcp_store)
    assert isinstance(own, ZeroDivisionError)
    assert isinstance(told, CheckpointError)
    assert "ZeroDivisionError" in str(told)


@pytest.mark.parametrize("door", ["read_all", "gather"])
def test_a_message_that_does_not_come_names_its_sender(door: str) -> None:
    channel = StoreChannel(dist.HashStore(), 0, world_size=2, timeout_s=0.01)
    arguments = ("never", b"" if door == "gather" else [1])
    with pytest.raises(LaunchError, match=r"rank 1\b"):
        getattr(channel, door)(*arguments)


@pytest.mark.parametrize(("door", "arguments"), [("has", ["k/0"]), ("read_all", ["k", [0]])])
def test_a_broken_connection_serves_no_later_channel(
    door: str, arguments: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise dist.DistNetworkError("Broken pipe")

    store = tcp_store()
    first, same = (StoreChannel(store, 0, world_size=2, timeout_s=JOIN_S) for _ in range(2))
    monkeypatch.setattr(first, "_store", SimpleNamespace(check=fail))
    with pytest.raises(LaunchError, match="Broken pipe"):
        getattr(first, door)(*arguments)
    assert first._connection is same._connection
    assert StoreChannel(store, 0, world_size=2, timeout_s=JOIN_S)._connection is not first._connection


def test_delete_waits_for_nothing_and_may_come_twice() -> None:
    def call(channel: StoreChannel) -> int:
        channel.timeout_s = 3600.0  # a channel that waited would outlast the test
        if channel.rank:
            channel.read_all("go", [0])
        else:
            before = int(channel._store.num_keys())
            names = channel.put("k", bytes(LARGE))
            channel.delete(["none", *names, *names])
            assert int(channel._store.num_keys()) == before
            channel.broadcast("broadcast", b"x")
            channel.delete(["broadcast/0"])
            channel.put("go", b"")
        return len(channel.gather("after the broadcast is deleted", b""))

    assert all_ranks(2, call, store=tcp_store) == [2, 0]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("sizes", [(5, LARGE), (LARGE, 5), (LARGE, LARGE)])
def test_the_first_text_counts_and_comes_down(first: int, sizes: tuple[int, int]) -> None:
    store, texts = tcp_store(), ["a" * sizes[0], "b" * sizes[1]]

    def call(channel: StoreChannel) -> str:
        if channel.rank != first:
            channel.read_all("settled", [first])
        text = channel.settle("k", texts[channel.rank])
        if channel.rank == first:
            channel.send("settled", b"")
        channel.agree("both have it", None)
        return text

    before = int(store.num_keys())
    assert all_ranks(2, call, store=lambda: store) == [texts[first]] * 2
    kept = 0 if sizes[1] == 5 else 4  # a long text from rank 1, with three chunks
    assert int(store.num_keys()) == before + kept + 1  # the last decision


def test_what_all_ranks_have_read_comes_down() -> None:
    store = tcp_store()

    def call(channel: StoreChannel) -> list[int]:
        counts = []
        for turn in range(12):
            channel.agree(f"agree {turn}", None)
            data = bytes([turn]) * (5 << 20)
            assert channel.broadcast(f"pick {turn}", data if channel.rank == 0 else None) == data
            if turn % 4 == 3 and channel.rank == 0:
                counts.append(int(channel._store.num_keys()))
        channel.agree("end", None)
        return counts

    before = int(store.num_keys())
    (counts, *_) = all_ranks(3, call, store=lambda: store)
    # The decision, of one key, the pick of a turn, of three, and at most the next report of either peer.
    assert max(counts) <= before + 4 + 2
    assert int(store.num_keys()) == before + 1


@pytest.mark.parametrize("prefix", ["", "group"])
@pytest.mark.parametrize("make", [lambda path: dist.FileStore(str(path), 2), lambda _: dist.HashStore()])
def test_any_store_deletes_a_message_with_its_chunks(
    make: Callable[[Path], dist.Store], prefix: str, tmp_path: Path
) -> None:
    store = make(tmp_path / "store")
    channel = StoreChannel(store, 0, world_size=2, timeout_s=5.0, prefix=prefix)
    names = channel.put("key", bytes(LARGE))
    assert [channel.has([name]) for name in names] == [True] * 4
    channel.delete([*names, "no such key", *names])
    assert [channel.has([name]) for name in names] == [False] * 4
    channel.put("key", b"again")
    assert channel.read_all("key", [0]) == [b"again"]
