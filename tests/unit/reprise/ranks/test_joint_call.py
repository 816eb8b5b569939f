"""Calls that all ranks make together: one that raises, one that skips a call, one that makes another."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from reprise.errors import CheckpointError, LaunchError, LockError
from reprise.ranks.channel import StoreChannel
from reprise.ranks.joint_call import JointCall
from tests.fakes import JOIN_S, run_ranks, tcp_store


def called(channel: StoreChannel, name: str = "save()", *, key: str = "k", timeout_s: float = JOIN_S) -> JointCall:
    call = JointCall(channel, key, name, timeout_s=timeout_s)
    call.announce()
    return call


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("error", [RuntimeError("no storage"), KeyboardInterrupt(), LockError("Taken", where="x")])
def test_an_exception_of_any_class_ends_every_rank(culprit: int, error: BaseException) -> None:
    def call(channel: StoreChannel) -> None:
        with called(channel).agreed():
            if channel.rank == culprit:
                raise error

    text = {RuntimeError: "RuntimeError: no storage", KeyboardInterrupt: "KeyboardInterrupt", LockError: "Taken (x)"}
    outcomes = run_ranks(3, call)
    assert outcomes.pop(culprit) is error
    kind = LockError if isinstance(error, LockError) else CheckpointError
    assert [(type(found), str(found)) for found in outcomes] == [
        (kind, f"Rank {culprit}: {text[type(error)]}.") for _ in outcomes
    ]


def test_a_rank_that_takes_long_to_prepare_is_waited_for() -> None:
    """Rank 1 prepares for longer than the others wait for ranks that are missing."""
    store = HashStore()

    class Watched(StoreChannel):
        """A channel of rank 0 that lets rank 1 go on after the time for a missing rank is over."""

        def wait_until(self, is_there: object, timeout_s: float) -> bool:
            is_over = super().wait_until(is_there, timeout_s)  # type: ignore[arg-type]
            if not is_over:
                self.put("time is over", b"")
            return is_over

    def call(channel: StoreChannel) -> None:
        own = Watched(store, channel.rank, world_size=2, timeout_s=JOIN_S)
        joint = called(own, timeout_s=0.1)
        own.put("in the call", b"")
        with joint.agreed():
            own.read_all("in the call", [1])
            if own.rank:
                own.read_all("time is over", [0])

    assert run_ranks(2, call, store=lambda: store) == [None, None]


def test_messages_of_earlier_calls_are_deleted() -> None:
    store = HashStore()

    def call(channel: StoreChannel) -> None:
        for number in range(20):
            with called(channel, key=f"call/{number}").agreed():
                pass

    assert run_ranks(3, call, store=lambda: store) == [None] * 3
    # The last call of each rank, and the decision of the last joint call.
    assert int(store.num_keys()) == 3 + 1


def test_a_decision_may_be_longer_than_a_value_in_the_store() -> None:
    store, text = tcp_store(), "é" * (5 << 20)

    def call(channel: StoreChannel) -> str:
        joint = called(channel)
        joint.offer(b"")
        answer = joint.decide(text if channel.coordinates else "")
        channel.agree("all have read it", None)
        return answer

    before = int(store.num_keys())
    assert run_ranks(3, call, store=lambda: store) == [text] * 3
    # The last call of each rank, and the last decision.
    assert int(store.num_keys()) == before + 3 + 1


def test_a_late_rank_reads_a_long_refusal() -> None:
    def call(channel: StoreChannel) -> object:
        if channel.rank == 2:
            channel.read_all("refused", [1])
        with pytest.raises(LockError, match="x" * 100_000):
            refuse_on_rank_1(channel)
        word = channel.from_first("word", lambda: "go on")
        if channel.rank == 1:
            channel.put("refused", b"")
        return word

    def refuse_on_rank_1(channel: StoreChannel) -> None:
        joint = called(channel)
        if channel.rank == 1:
            problem = LockError("x" * 100_000)
            joint.refuse(problem)
            raise problem
        joint.offer(b"")
        joint.decide("")

    assert run_ranks(3, call, store=tcp_store) == ["go on"] * 3


def test_a_lost_store_is_an_error_of_its_own() -> None:
    class Lost(HashStore):  # type: ignore[misc]
        def clone(self) -> Store:
            return self

        def compare_set(self, *_: object) -> bytes:
            raise ConnectionError

    with pytest.raises((LaunchError, ConnectionError)):
        called(StoreChannel(Lost(), 0, world_size=2, timeout_s=JOIN_S))


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_refusal_ended_by_an_interrupt_is_out_of_step(is_stored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(channel: StoreChannel) -> bool:
        joint = called(channel)
        if channel.rank == 0:
            return False
        settle = channel.settle

        def interrupted(key: str, value: str) -> str:
            if is_stored:
                settle(key, value)
            raise KeyboardInterrupt

        monkeypatch.setattr(channel, "settle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            joint.refuse(LockError("Taken", where="x"))
        return joint.is_out_of_step

    assert run_ranks(2, call) == [False, True]
