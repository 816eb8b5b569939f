"""Calls that all ranks make together: one that raises, one that skips a call, one that makes another."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from reprise.errors import CheckpointError, LaunchError, LockError
from reprise.ranks.channel import StoreChannel
from reprise.ranks.joint_call import JointCall, OpenCall
from tests.fakes import JOIN_S, run_ranks


def called(channel: StoreChannel, name: str = "save()", *, key: str = "k", timeout_s: float = JOIN_S) -> JointCall:
    return JointCall(channel, key, name, timeout_s=timeout_s)


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_learns_what_the_coordinator_decides(ranks: int) -> None:
    def call(channel: StoreChannel) -> tuple[list[bytes], str, str]:
        joint = called(channel)
        offers = joint.offer(f"from {channel.rank}".encode())
        return offers, joint.decide("go" if channel.coordinates else ""), joint.nonce

    outcomes = run_ranks(ranks, call)
    nonce = outcomes[0][2]  # type: ignore[index]
    offers = [f"from {rank}".encode() for rank in range(ranks)]
    assert outcomes == [(offers if rank == 0 else [], "go", nonce) for rank in range(ranks)]


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


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_skips_a_call_is_named(missing: int) -> None:
    """The others get a time-out, and the rank itself gets it too where it makes the call later."""

    def call(channel: StoreChannel) -> list[str]:
        with called(channel, "load()", key="first").agreed():
            pass
        found = []
        if channel.rank == missing:
            for rank in channel.ranks:
                if rank != missing:
                    channel.read(f"over/{rank}")
        for name, key in (("save(iteration=40)", "second"), ("save(iteration=40)", "third")):
            try:
                with called(channel, name, key=key, timeout_s=0.2 if key == "second" else JOIN_S).agreed():
                    pass
            except CheckpointError as error:
                found.append(str(error))
                if channel.rank != missing:
                    channel.put(f"over/{channel.rank}", b"")
        return found

    outcomes = run_ranks(3, call)
    text = f"Rank {missing} has not called save(iteration=40) within 0.2 s; rank {missing} last called load(). "
    for outcome in outcomes:
        assert isinstance(outcome, list), outcome
        (message,) = outcome
        assert message.startswith(text)
    assert len({str(outcome) for outcome in outcomes}) == 1


def test_a_rank_at_another_call_is_told_apart_at_once() -> None:
    def call(channel: StoreChannel) -> None:
        with called(channel, "save(iteration=3)" if channel.rank else "load()").agreed():
            pass

    for outcome in run_ranks(3, call):
        assert isinstance(outcome, CheckpointError)
        assert "found load() on rank 0; save(iteration=3) on rank " in str(outcome)


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
        own.put(f"here/{own.rank}", b"")
        with joint.agreed():
            own.read("here/1")
            if own.rank:
                own.read("time is over")

    assert run_ranks(2, call, store=lambda: store) == [None, None]


def test_a_failure_after_the_decision_ends_the_waits() -> None:
    def call(channel: StoreChannel) -> None:
        with OpenCall(channel, "save()", timeout_s=JOIN_S, check=lambda: None) as joint:
            with joint.agreed():
                pass
            if channel.rank:
                raise ValueError("odd")
            channel.read("never")

    first, second = run_ranks(2, call)
    assert type(first) is CheckpointError
    assert str(first) == "Rank 1 failed: ValueError: odd."
    assert type(second) is ValueError


def test_messages_of_earlier_calls_are_deleted() -> None:
    store = HashStore()

    def call(channel: StoreChannel) -> None:
        for number in range(20):
            with called(channel, key=f"call/{number}").agreed():
                pass

    assert run_ranks(3, call, store=lambda: store) == [None] * 3
    # The last call of each rank, and of the last joint call its name and its decision.
    assert int(store.num_keys()) <= 3 + 2 + 1


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
