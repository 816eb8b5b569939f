"""Messages between ranks that are threads, over one real store."""

from __future__ import annotations

import os

import pytest

from tests.fakes import all_ranks, run_ranks, tcp_store
from trainer.checkpoint.commit.channel import Board, lone_board
from trainer.errors import CheckpointError, LaunchError, LockError, MismatchError, TrainerError


def test_a_message_of_many_chunks_arrives_whole() -> None:
    data = os.urandom((9 << 20) + 5)

    def call(board: Board) -> bytes:
        return board.from_rank0("big", data if board.rank == 0 else None)

    assert all_ranks(2, call, store=tcp_store) == [data, data]


def test_an_empty_message_arrives() -> None:
    assert all_ranks(2, lambda board: board.from_rank0("k", b"" if board.rank == 0 else None), store=tcp_store) == [
        b"",
        b"",
    ]


def test_the_first_of_several_messages_ends_the_wait_and_so_does_a_check_that_raises() -> None:
    looks: list[int] = []

    def look_twice() -> None:
        looks.append(0)
        if len(looks) > 1:
            raise CheckpointError("No longer wanted")

    def call(board: Board) -> str:
        if board.rank == 0:
            board.post("b", b"")
            board.read("done")
            return "b"
        found = board.await_any(["a", "b"], sender="rank 0", check=lambda: None)
        with pytest.raises(CheckpointError, match="No longer wanted"):
            board.await_any(["a"], sender="rank 0", check=look_twice)
        with pytest.raises(LaunchError, match="No message from rank 0"):
            board.clone(0.0).await_any(["a"], sender="rank 0", check=lambda: None)
        board.post("done", b"")
        return found

    assert all_ranks(2, call, store=tcp_store) == ["b", "b"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collect_gives_rank_0_everything_in_order_of_rank(world_size: int) -> None:
    def call(board: Board) -> list[bytes]:
        return board.collect("k", f"from {board.rank}".encode())

    found = all_ranks(world_size, call, store=tcp_store)
    assert found[0] == [f"from {rank}".encode() for rank in range(world_size)]
    assert found[1:] == [[]] * (world_size - 1)


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("kind", [MismatchError, LockError, LaunchError, CheckpointError])
def test_agree_raises_on_every_rank_what_one_rank_found(culprit: int, kind: type[TrainerError]) -> None:
    def call(board: Board) -> None:
        board.agree("first", None)
        board.agree("second", kind("The disk is gone") if board.rank == culprit else None)

    outcomes = run_ranks(3, call, store=tcp_store)
    assert [type(outcome) for outcome in outcomes] == [kind] * 3
    assert [str(outcome) for outcome in outcomes] == [
        "The disk is gone." if rank == culprit else f"Rank {culprit}: The disk is gone." for rank in range(3)
    ]


def test_agree_alone_raises_the_problem_itself() -> None:
    problem = CheckpointError("No")
    lone_board().agree("k", None)
    with pytest.raises(CheckpointError) as caught:
        lone_board().agree("k", problem)
    assert caught.value is problem


def test_read_of_a_missing_message_names_the_sender_in_time() -> None:
    def call(board: Board) -> bytes | None:
        return board.clone(0.3).read("never", sender="rank 0") if board.rank == 1 else None

    outcome = run_ranks(2, call, store=tcp_store)[1]
    assert isinstance(outcome, LaunchError)
    assert "No message from rank 0" in str(outcome)
    assert "never" in str(outcome)


def test_collect_names_the_rank_that_is_silent() -> None:
    def call(board: Board) -> list[bytes]:
        return board.clone(0.3).collect("k", b"x") if board.rank != 1 else []

    outcome = run_ranks(3, call, store=tcp_store)[0]
    assert isinstance(outcome, LaunchError)
    assert "rank 1" in str(outcome)


def test_forget_takes_all_chunks_down() -> None:
    def call(board: Board) -> int:
        board.post("k", bytes(9 << 20))
        before: int = board._store.num_keys()
        board.forget(["k"])
        return before - int(board._store.num_keys())

    assert run_ranks(2, lambda board: call(board) if board.rank == 0 else 0, store=tcp_store)[0] == 4


def test_discard_takes_down_what_hangs_and_waits_for_nothing() -> None:
    def call(board: Board) -> list[int]:
        board.timeout_s = 3600.0  # a board that waited would outlast the test
        counts = [int(board._store.num_keys())]
        board.post("k", bytes(9 << 20))
        board.discard(["none", "k", "k"])
        counts.append(int(board._store.num_keys()))
        board.from_rank0("told", b"x")
        board.discard(["told"])
        board.post("go", b"")
        board.collect("after what was told is gone", b"")
        return counts

    def peer(board: Board) -> list[int]:
        board.read("go")
        board.collect("after what was told is gone", b"")
        return []

    outcome = run_ranks(2, lambda board: peer(board) if board.rank else call(board), store=tcp_store)[0]
    assert isinstance(outcome, list), outcome
    assert outcome[0] == outcome[1]


def test_post_under_a_key_that_is_taken_is_an_error() -> None:
    def call(board: Board) -> None:
        if board.rank == 0:
            board.post("k", b"")
            board.post("k", b"x")

    outcome = run_ranks(2, call, store=tcp_store)[0]
    assert isinstance(outcome, LaunchError)
    assert "lost a message" in str(outcome)


def test_what_all_ranks_have_read_comes_down() -> None:
    store = tcp_store()

    def call(board: Board) -> list[int]:
        counts = []
        for turn in range(12):
            board.agree(f"agree {turn}", None)
            board.from_rank0(f"pick {turn}", bytes(5 << 20) if board.rank == 0 else None)
            if turn % 4 == 3 and board.rank == 0:
                counts.append(int(board._store.num_keys()))
        board.agree("end", None)
        return counts

    before = int(store.num_keys())
    (counts, *_) = all_ranks(3, call, store=lambda: store)
    # The verdict and the pick of a turn, of three keys, and at most the next report of either peer, of one key each.
    assert max(counts) <= before + 4 + 2
    assert int(store.num_keys()) == before + 1
