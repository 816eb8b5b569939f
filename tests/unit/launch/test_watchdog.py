"""Who ends when another rank has given up, or the store's host does not answer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from reprise.errors import CheckpointError, LaunchError
from reprise.ranks import StoreChannel
from tests.fakes import JOIN_S, run_ranks
from trainer.launch import watchdog as peers
from trainer.launch.hangs import Activity
from trainer.launch.watchdog import Watchdog


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(peers, "_GRACE_S", 0.2)
    monkeypatch.setattr(peers, "_GUARD_EVERY_S", 0.01)


NOWHERE = Path(os.devnull, "hangs")  # a folder that cannot be made


class Standing:
    """A clock that stands still: no grace is over, whatever the machine does."""

    def monotonic(self) -> float:
        return 100.0


class Rank:
    """A watch whose process does not end, and its rank's channels."""

    watches: ClassVar[list[Watchdog]] = []  # of a test's ranks

    def __init__(
        self, store: Store, rank: int, *, world_size: int = 2, timeout_s: float = JOIN_S, hangs: Path = NOWHERE
    ) -> None:
        self.activity = Activity()
        self.channel = StoreChannel(store, rank, world_size=world_size, timeout_s=timeout_s)
        self.has_left = threading.Event()
        self.watch = Watchdog(self.channel.clone(), timeout_s, leave=self._leave, activity=self.activity, hangs=hangs)
        self.watches.append(self.watch)
        self.statuses: list[int] = []

    def _leave(self, status: int) -> None:
        self.statuses.append(status)
        self.has_left.set()


@pytest.fixture(autouse=True)
def _stopped() -> Iterator[None]:
    """Stop every watch at the end of its test: its threads would speak a minute later, within another test."""
    yield
    while Rank.watches:
        Rank.watches.pop().stop()


def test_a_rank_that_hangs_is_left_when_another_gave_up(capsys: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    first, second = Rank(store, 0), Rank(store, 1)
    second.watch.start()
    first.channel.fail("the disk is gone")
    assert second.has_left.wait(JOIN_S)
    assert second.statuses == [1]
    assert "rank 1 exits: Rank 0 failed: the disk is gone" in capsys.readouterr().err
    cause = second.watch.explain(LaunchError("No message from rank 0"), second.channel)
    assert cause == "Rank 0 failed: the disk is gone"


def test_a_rank_that_ends_by_itself_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "time", Standing())
    store = HashStore()
    first, second = Rank(store, 0), Rank(store, 1)
    second.watch.start()
    first.channel.fail("the disk is gone")
    store.wait(["here/1"])  # it knows, and answers
    second.watch.stop()
    second.watch._thread.join(JOIN_S)
    assert not second.watch._thread.is_alive()
    assert second.statuses == []


def test_nobody_is_watched_in_a_world_of_one() -> None:
    only = Rank(HashStore(), 0, world_size=1)
    only.watch.start()
    before = threading.active_count()
    only.watch.stop()
    assert threading.active_count() == before


def test_an_error_of_all_ranks_has_no_cause_among_them() -> None:
    ranks = [Rank(store := HashStore(), 0), Rank(store, 1)]
    assert ranks[0].watch.explain(CheckpointError("No"), ranks[1].channel) is None  # an error of its own
    problem = CheckpointError("The disk is full")
    errors = run_ranks(2, lambda channel: channel.agree("k", None if channel.rank else problem))
    for rank, error in zip(ranks, errors, strict=True):
        assert isinstance(error, CheckpointError)
        assert rank.watch.explain(error, rank.channel) is None


def test_a_lost_connection_is_caused_by_the_silent_rank() -> None:
    store = HashStore()
    ranks = [Rank(store, rank, world_size=3) for rank in range(3)]
    ranks[0].watch.start()  # alive, and watching; rank 1 is not
    cause = ranks[2].watch.explain(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed"), ranks[2].channel)
    assert cause == "Rank 1 does not answer: it was killed or is hung"
    ranks[0].watch.stop()


def test_a_rank_that_shows_no_sign_of_life_is_named_to_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "time", Standing())  # silence is counted in looks, and the store is never silent
    monkeypatch.setattr(peers, "_GRACE_S", 0.0)
    store = HashStore()
    ranks = [Rank(store, rank, world_size=3, timeout_s=1.0) for rank in range(3)]
    for rank in ranks[:2]:
        rank.watch.start()  # rank 2 is stopped before it does
    for rank in ranks[:2]:
        assert rank.has_left.wait(JOIN_S)
        assert rank.statuses == [1]
    said = capsys.readouterr().err
    assert "rank 0 exits: Rank 1 failed: Rank 2 sent no heartbeat for 1 s" in said
    assert "rank 1 exits: Rank 2 sent no heartbeat" in said


def test_a_rank_is_lost_once_its_heartbeat_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_CHECK_INTERVAL_S", 1.0)
    store = HashStore()
    first, second = (Rank(store, rank, timeout_s=8.0).watch for rank in range(2))
    for _ in range(50):
        assert (first._lost_rank(), second._lost_rank()) == (None, None)
    looks = next(count for count in range(1, 50) if first._lost_rank())
    assert 8 <= looks <= 10


class Brittle(Store):  # type: ignore[misc]
    """A store whose host may die or hang."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = HashStore()
        self.is_dead = False
        self.flows = threading.Event()
        self.flows.set()

    def clone(self) -> Brittle:
        return self

    def _do(self, call: Callable[[], object]) -> object:
        self.flows.wait(JOIN_S)
        if self.is_dead:
            raise dist.DistNetworkError("Broken pipe")
        return call()

    def check(self, keys: list[str]) -> bool:
        return bool(self._do(lambda: self.inner.check(keys)))

    def get(self, key: str) -> bytes:
        return self._do(lambda: self.inner.get(key))  # type: ignore[return-value]

    def set(self, key: str, value: str) -> None:
        self._do(lambda: self.inner.set(key, value))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._do(lambda: self.inner.compare_set(key, expected, desired))  # type: ignore[return-value]


def test_a_store_that_is_gone_ends_those_who_hang(capsys: pytest.CaptureFixture[str]) -> None:
    store = Brittle()
    rank = Rank(store, 1)
    rank.watch.start()
    store.is_dead = True
    assert rank.has_left.wait(JOIN_S)
    assert "rank 1 exits: The store is gone: its host, rank 0 or" in capsys.readouterr().err


def test_an_error_after_the_end_of_the_stores_host_names_that() -> None:
    store = Brittle()
    rank = Rank(store, 1)
    store.is_dead = True
    cause = rank.watch.explain(RuntimeError("gloo: Connection reset by peer"), rank.channel)
    assert str(cause).startswith("The store is gone: its host, rank 0 or")


def test_a_store_that_hangs_ends_all_even_the_one_that_explains(capsys: pytest.CaptureFixture[str]) -> None:
    store = Brittle()
    rank = Rank(store, 1, timeout_s=0.3)
    rank.watch.start()
    store.flows.clear()
    explaining = threading.Thread(target=rank.watch.explain, args=(LaunchError("x"), rank.channel), daemon=True)
    explaining.start()
    assert rank.has_left.wait(JOIN_S)
    assert explaining.is_alive()
    assert "agent on the first node, has not answered" in capsys.readouterr().err
    store.flows.set()
    explaining.join(JOIN_S)


class Suspended:
    """A clock of a process that is stopped for an hour before each look at it."""

    def __init__(self) -> None:
        self.looks = 0

    def monotonic(self) -> float:
        self.looks += 1
        return 3600.0 * self.looks


def test_time_while_a_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Suspended()
    store = Brittle()
    store.flows.clear()
    rank = Rank(store, 1, timeout_s=60.0)
    monkeypatch.setattr(peers, "time", clock)
    rank.watch.start()
    assert rank.has_left.wait(JOIN_S)
    assert clock.looks > 60.0 / peers._STOPPED_S
    store.flows.set()


def test_a_rank_that_is_late_is_named_with_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    first, second = Rank(store, 0, hangs=tmp_path), Rank(store, 1, hangs=tmp_path)
    first.activity.begin("the step", 12)
    second.activity.begin("the data", 12)
    for rank in (first, second):
        rank.watch.start()
    cause = first.watch.explain(dist.DistError("timed out"), first.channel)
    assert cause == "Rank 1 is in the data of iteration 12, for which rank 0 waited in the step of iteration 12"
    assert second.has_left.wait(JOIN_S)
    assert "rank 1 exits: Rank 0 failed: timed out; it was in the data of iteration 12" in capsys.readouterr().err
    stacks = {path.suffixes[-2]: path.read_text() for path in tmp_path.iterdir()}
    assert stacks.keys() == {".rank0", ".rank1"}
    assert all("Thread 0x" in text and "test_watchdog.py" in text for text in stacks.values())


def test_a_lost_rank_is_named_with_its_last_activity() -> None:
    store = HashStore()
    first, second = (Rank(store, rank) for rank in range(2))
    second.activity.begin("the save", 40)
    second.watch._beat()
    assert peers._last_activity(first.channel, 1) == "; at its last heartbeat it was in the save of iteration 40"
    assert peers._last_activity(second.channel, 0) == ""
