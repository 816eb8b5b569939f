"""Messages between ranks that are threads, over one real store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from reprise.commit.channel import StoreChannel, single_rank_channel
from reprise.errors import CheckpointError, LaunchError, LockError, MismatchError, TrainerError, UnreadableError
from tests.fakes import all_ranks, run_ranks, tcp_store


def test_a_message_of_many_chunks_arrives_whole() -> None:
    data = os.urandom((9 << 20) + 5)

    def call(channel: StoreChannel) -> bytes:
        return channel.broadcast("big", data if channel.rank == 0 else None)

    assert all_ranks(2, call, store=tcp_store) == [data, data]


def test_an_empty_message_arrives() -> None:
    assert all_ranks(
        2, lambda channel: channel.broadcast("k", b"" if channel.rank == 0 else None), store=tcp_store
    ) == [
        b"",
        b"",
    ]


def test_the_first_message_or_a_raising_check_ends_the_wait() -> None:
    looks: list[int] = []

    def look_twice() -> None:
        looks.append(0)
        if len(looks) > 1:
            raise CheckpointError("No longer wanted")

    def call(channel: StoreChannel) -> str:
        if channel.rank == 0:
            channel.put("b", b"")
            channel.read("done")
            return "b"
        found = channel.await_any(["a", "b"], sender="rank 0", check=lambda: None)
        with pytest.raises(CheckpointError, match="No longer wanted"):
            channel.await_any(["a"], sender="rank 0", check=look_twice)
        with pytest.raises(LaunchError, match="No message from rank 0"):
            channel.clone(0.0).await_any(["a"], sender="rank 0", check=lambda: None)
        channel.put("done", b"")
        return found

    assert all_ranks(2, call, store=tcp_store) == ["b", "b"]


def test_what_is_published_again_replaces_the_first() -> None:
    def call(channel: StoreChannel) -> bytes:
        if channel.rank == 0:
            for count in range(3):
                channel.publish("heartbeat", b"%d" % count)
            channel.put("done", b"")
        channel.read("done")
        return channel.read("heartbeat")

    assert all_ranks(2, call, store=tcp_store) == [b"2", b"2"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gather_gives_rank_0_everything_in_order_of_rank(world_size: int) -> None:
    def call(channel: StoreChannel) -> list[bytes]:
        return channel.gather("k", f"from {channel.rank}".encode())

    found = all_ranks(world_size, call, store=tcp_store)
    assert found[0] == [f"from {rank}".encode() for rank in range(world_size)]
    assert found[1:] == [[]] * (world_size - 1)


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("kind", [MismatchError, LockError, LaunchError, CheckpointError])
def test_agree_raises_on_every_rank_what_one_rank_found(culprit: int, kind: type[TrainerError]) -> None:
    def call(channel: StoreChannel) -> None:
        channel.agree("first", None)
        channel.agree("second", kind("The disk is gone") if channel.rank == culprit else None)

    outcomes = run_ranks(3, call, store=tcp_store)
    assert [type(outcome) for outcome in outcomes] == [kind] * 3
    assert [str(outcome) for outcome in outcomes] == [
        "The disk is gone." if rank == culprit else f"Rank {culprit}: The disk is gone." for rank in range(3)
    ]


def test_agree_alone_raises_the_problem_itself() -> None:
    problem = CheckpointError("No")
    single_rank_channel().agree("k", None)
    with pytest.raises(CheckpointError) as caught:
        single_rank_channel().agree("k", problem)
    assert caught.value is problem


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_gets_what_the_first_makes(world_size: int) -> None:
    calls: list[int] = []

    def call(channel: StoreChannel) -> object:
        def make() -> object:
            calls.append(channel.rank)
            return {"path": "a\ud800", "pair": (1, None)}

        return channel.from_first("k", make)

    assert all_ranks(world_size, call, store=tcp_store) == [{"path": "a\ud800", "pair": [1, None]}] * world_size
    assert calls == [0]


@pytest.mark.parametrize("kind", [MismatchError, LockError, UnreadableError, CheckpointError])
def test_every_rank_raises_what_the_first_raises(kind: type[TrainerError]) -> None:
    def call(channel: StoreChannel) -> None:
        def fail() -> None:
            raise kind("The disk is gone")

        channel.from_first("k", fail)

    outcomes = run_ranks(3, call, store=tcp_store)
    assert [type(outcome) for outcome in outcomes] == [kind] * 3
    assert [str(outcome) for outcome in outcomes] == ["The disk is gone.", *["Rank 0: The disk is gone."] * 2]
    assert all(isinstance(outcome, TrainerError) and outcome.is_known_to_all for outcome in outcomes)


def test_a_defect_of_the_first_ends_every_rank() -> None:
    def call(channel: StoreChannel) -> None:
        channel.from_first("k", lambda: [] if channel.rank else 1 // 0)

    outcomes = run_ranks(2, call, store=tcp_store)
    assert isinstance(outcomes[0], ZeroDivisionError)
    assert isinstance(outcomes[1], CheckpointError)
    assert "ZeroDivisionError" in str(outcomes[1])


@pytest.mark.parametrize("culprit", [None, 1, 2])
def test_ranks_with_another_digest_are_described(culprit: int | None) -> None:
    def call(channel: StoreChannel) -> str:
        digest = "b" if channel.rank == culprit else "a"
        channel.require_same("k", digest, lambda expected: MismatchError("Others", expected=expected, found=digest))
        return digest

    outcomes = run_ranks(3, call, store=tcp_store)
    if culprit is None:
        assert outcomes == ["a"] * 3
        return
    assert [type(outcome) for outcome in outcomes] == [MismatchError] * 3
    text = "Others, expected a, found b"
    assert [text in str(outcome) for outcome in outcomes] == [True] * 3, outcomes
    assert [str(outcome).startswith(f"Rank {culprit}: ") for outcome in outcomes] == [r != culprit for r in range(3)]


def test_read_of_a_missing_message_names_the_sender_in_time() -> None:
    def call(channel: StoreChannel) -> bytes | None:
        return channel.clone(0.3).read("never", sender="rank 0") if channel.rank == 1 else None

    outcome = run_ranks(2, call, store=tcp_store)[1]
    assert isinstance(outcome, LaunchError)
    assert "No message from rank 0" in str(outcome)
    assert "never" in str(outcome)


def test_gather_names_the_rank_that_is_silent() -> None:
    def call(channel: StoreChannel) -> list[bytes]:
        return channel.clone(0.3).gather("k", b"x") if channel.rank != 1 else []

    outcome = run_ranks(3, call, store=tcp_store)[0]
    assert isinstance(outcome, LaunchError)
    assert "rank 1" in str(outcome)


def test_a_message_of_many_chunks_is_deleted_whole() -> None:
    def call(channel: StoreChannel) -> int:
        channel.put("k", bytes(9 << 20))
        before: int = channel._store.num_keys()
        channel.delete(["k"])
        return before - int(channel._store.num_keys())

    assert run_ranks(2, lambda channel: call(channel) if channel.rank == 0 else 0, store=tcp_store)[0] == 4


@pytest.mark.parametrize("size", [0, 5, 9 << 20])
def test_take_returns_a_message_and_leaves_no_key(size: int) -> None:
    data = os.urandom(size)

    def call(channel: StoreChannel) -> bytes:
        if channel.rank == 0:
            channel.put("k", data)
            return data
        found = channel.take("k", sender="rank 0")
        assert not any(channel._store.check([key]) for key in ("k", "k/0", "k/1", "k/2"))
        return found

    assert all_ranks(2, call, store=tcp_store) == [data, data]


def test_take_asks_the_store_no_more_than_it_must() -> None:
    calls: list[str] = []

    class Counted(dist.HashStore):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> object:
            if name in ("check", "get", "delete_key"):
                calls.append(name)
            return super().__getattribute__(name)

    channel = StoreChannel(Counted(), 0, world_size=1, timeout_s=5.0)
    channel.put("k", b"data")
    assert channel.take("k") == b"data"
    assert calls == ["check", "get", "delete_key"]


def test_take_of_a_missing_message_names_the_sender() -> None:
    with pytest.raises(LaunchError, match="No message from rank 3"):
        StoreChannel(dist.HashStore(), 0, world_size=1, timeout_s=0.0).take("never", sender="rank 3")


def test_delete_waits_for_nothing_and_may_come_twice() -> None:
    def call(channel: StoreChannel) -> list[int]:
        channel.timeout_s = 3600.0  # a channel that waited would outlast the test
        counts = [int(channel._store.num_keys())]
        channel.put("k", bytes(9 << 20))
        channel.delete(["none", "k", "k"])
        counts.append(int(channel._store.num_keys()))
        channel.broadcast("broadcast", b"x")
        channel.delete(["broadcast"])
        channel.put("go", b"")
        channel.gather("after the broadcast is deleted", b"")
        return counts

    def peer(channel: StoreChannel) -> list[int]:
        channel.read("go")
        channel.gather("after the broadcast is deleted", b"")
        return []

    outcome = run_ranks(2, lambda channel: peer(channel) if channel.rank else call(channel), store=tcp_store)[0]
    assert isinstance(outcome, list), outcome
    assert outcome[0] == outcome[1]


def test_put_under_a_key_that_is_stored_is_an_error() -> None:
    def call(channel: StoreChannel) -> None:
        if channel.rank == 0:
            channel.put("k", b"")
            channel.put("k", b"x")

    outcome = run_ranks(2, call, store=tcp_store)[0]
    assert isinstance(outcome, LaunchError)
    assert "lost a message" in str(outcome)


def test_what_all_ranks_have_read_comes_down() -> None:
    store = tcp_store()

    def call(channel: StoreChannel) -> list[int]:
        counts = []
        for turn in range(12):
            channel.agree(f"agree {turn}", None)
            channel.broadcast(f"pick {turn}", bytes(5 << 20) if channel.rank == 0 else None)
            if turn % 4 == 3 and channel.rank == 0:
                counts.append(int(channel._store.num_keys()))
        channel.agree("end", None)
        return counts

    before = int(store.num_keys())
    (counts, *_) = all_ranks(3, call, store=lambda: store)
    # The decision, of one key, the pick of a turn, of three, and at most the next report of either peer.
    assert max(counts) <= before + 4 + 2
    assert int(store.num_keys()) == before + 1


def test_a_message_on_a_file_store_is_deleted(tmp_path: Path) -> None:
    """A FileStore reports every deletion as done, also that of a key that it does not have."""
    store = dist.FileStore(str(tmp_path / "store"), 2)
    channel = StoreChannel(store, 0, world_size=2, timeout_s=5.0)
    channel.put("key", b"data")
    channel.delete(["key", "no such key"])
    assert not store.check(["key"])
    assert not store.check(["key/0"])


@pytest.mark.parametrize(("size", "calls"), [(0, ["compare_set"]), (9 << 20, ["set", "set", "set", "compare_set"])])
def test_a_small_message_is_one_call_of_the_store(size: int, calls: list[str]) -> None:
    made: list[str] = []

    class Counted(dist.HashStore):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> object:
            if name in ("set", "compare_set"):
                made.append(name)
            return super().__getattribute__(name)

    channel = StoreChannel(Counted(), 0, world_size=1, timeout_s=5.0)
    channel.put("k", bytes(size))
    assert made == calls
    assert channel.read("k") == bytes(size)


def test_a_second_message_may_leave_the_first() -> None:
    channel = single_rank_channel()
    channel.put("k", b"first")
    channel.put("k", b"second", is_first=False)
    assert channel.read("k") == b"first"
