"""Ranks of one host put columns together in memory that they share: same files, few writes, and a way out for all."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.fakes import Axis, FailingFiles, Sharding, run_ranks, sample_specs, sample_state
from tests.harness import tensor_files
from trainer.checkpoint import strips as striping
from trainer.checkpoint.board import Board, lone_board
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.commit import Attempt
from trainer.checkpoint.files import Files
from trainer.checkpoint.layout import build_layout
from trainer.checkpoint.live import Contents
from trainer.checkpoint.policy import SavePolicy, SaveReport
from trainer.checkpoint.reader import FORMAT, STATE
from trainer.checkpoint.sharing import Neighbours, SharedMemory
from trainer.checkpoint.store import CheckpointFolder
from trainer.checkpoint.strips import STRIPS_AT, Strip
from trainer.errors import CheckpointError, TrainerError

SPECS = sample_specs()
STATE_BYTES = sample_state(SPECS, seed=1)
COLUMNS = Sharding("columns over 2", (Axis("column", 2),))
GRID = Sharding("rows and columns", (Axis("row", 2), Axis("column", 2)))
COPIES = Sharding("replicas of columns", (Axis("replica", 2), Axis("column", 2)))
ALONE = Sharding("one rank")


@pytest.fixture(autouse=True)
def _strip_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(striping, "STRIP_BYTES", 1 << 16)


class CountingFiles(Files):
    """A file system that counts the writes of all ranks."""

    def __init__(self) -> None:
        self.writes = Counter[int]()

    def write(self, descriptor: int, buffers: Sequence[memoryview], *, offset: int) -> None:
        self.writes[threading.get_ident()] += 1
        super().write(descriptor, buffers, offset=offset)


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
) -> list[Saved]:
    """Save from all ranks, some of them on one host; return each rank's reports."""

    def run(board: Board) -> Saved:
        policy = SavePolicy(folder, staging_bytes=staging_bytes(board.rank))
        neighbours = next((host for host in hosts if board.rank in host), ())
        checkpointer = Checkpointer(policy, board, nonce="n", files=files(board.rank), neighbours=neighbours)
        checkpointer.start()
        found = [checkpointer.save(iteration, contents(sharding, board.rank, iteration)) for iteration in iterations]
        checkpointer.close()
        return [report for report in found if report is not None]

    found = []
    for outcome in run_ranks(max(sharding.world_size, 1), run):
        if isinstance(outcome, BaseException):
            raise outcome
        found.append(outcome)
    return found


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


@pytest.mark.parametrize(
    ("sharding", "hosts"),
    [
        (COLUMNS, [[0, 1]]),
        (GRID, [[0, 1, 2, 3]]),
        (GRID, [[0, 1], [2, 3]]),
        (GRID, [[0, 2], [1, 3]]),
        (COPIES, [[0, 1, 2, 3]]),
        (COPIES, [[0, 1], [2, 3]]),
        (COPIES, [[0, 1, 2], [3]]),
    ],
)
def test_the_files_are_those_of_one_rank(
    tmp_path: Path, expected: dict[str, bytes], sharding: Sharding, hosts: list[list[int]]
) -> None:
    assert_saved(save(tmp_path, sharding, hosts=hosts, iterations=(1, 2, 3)))
    for iteration in (1, 2, 3):
        assert tensor_files(tmp_path / f"iter_{iteration:07d}") == expected


def test_no_row_is_written_by_itself(tmp_path: Path) -> None:
    counted, by_row = CountingFiles(), CountingFiles()
    assert_saved(save(tmp_path / "a", COLUMNS, hosts=[[0, 1]], files=lambda _: counted))
    assert_saved(save(tmp_path / "b", COLUMNS, files=lambda _: by_row))
    # 2402 rows of the embedding and 2402 of its moment; in strips of 64 KiB, at most three writes for each.
    assert by_row.writes.total() > 4800
    assert counted.writes.total() < 3 * (4_804_000 + 480_400) // (1 << 16) + 60


def test_a_rank_without_the_memory_for_it_has_all_write_rows(tmp_path: Path, expected: dict[str, bytes]) -> None:
    counted = CountingFiles()
    saved = save(
        tmp_path, COLUMNS, hosts=[[0, 1]], files=lambda _: counted, staging_bytes=lambda rank: 1000 if rank else None
    )
    assert_saved(saved)
    assert counted.writes.total() > 4800
    assert tensor_files(tmp_path / "iter_0000001") == expected


def test_a_rank_that_fails_fails_the_save_and_the_next_one_is_whole(tmp_path: Path, expected: dict[str, bytes]) -> None:
    failing = FailingFiles("write", errno.EIO, after=2)
    failing.is_armed = True

    class Once(Files):
        """The failing file system, until it has failed."""

        def write(self, descriptor: int, buffers: Sequence[memoryview], *, offset: int) -> None:
            if not failing.failures:
                failing.write(descriptor, buffers, offset=offset)
            else:
                super().write(descriptor, buffers, offset=offset)

    saved = save(
        tmp_path,
        COLUMNS,
        hosts=[[0, 1]],
        iterations=(1, 2),
        files=lambda rank: Once() if rank else Files(),
    )
    for reports in saved:
        assert "Input/output error" in str(reports[0].error)
        assert reports[1].error is None
    assert not (tmp_path / "iter_0000001").exists()
    assert tensor_files(tmp_path / "iter_0000002") == expected


def test_where_there_is_no_memory_the_save_fails_and_the_next_one_writes_rows(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_memory(*_: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "posix_fallocate", refuse_memory)
    for reports in save(tmp_path, COLUMNS, hosts=[[0, 1]], iterations=(1, 2)):
        assert "no memory in which the ranks" in str(reports[0].error)
        assert reports[1].error is None
    assert tensor_files(tmp_path / "iter_0000002") == expected


def test_memory_that_cannot_be_opened_has_all_write_rows(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SharedMemory, "open", staticmethod(lambda _: None))
    assert_saved(save(tmp_path, COLUMNS, hosts=[[0, 1]]))
    assert tensor_files(tmp_path / "iter_0000001") == expected
    assert "cannot be shared" in caplog.text


def test_many_saves_leave_no_descriptor_behind(tmp_path: Path) -> None:
    save(tmp_path / "first", COLUMNS, hosts=[[0, 1]])
    before = len(os.listdir("/proc/self/fd"))
    assert_saved(save(tmp_path / "more", COLUMNS, hosts=[[0, 1]], iterations=range(1, 9)))
    assert len(os.listdir("/proc/self/fd")) <= before


def attempt(folder: Path) -> Attempt:
    return Attempt(1, "n-1", CheckpointFolder(folder, Files()), build_layout(SPECS, file_bytes=1 << 20))


def test_a_rank_that_refuses_ends_the_wait_of_the_others(tmp_path: Path) -> None:
    def run(board: Board) -> None:
        if board.rank == 1:
            Neighbours(board, [0, 1]).refuse(board, attempt(tmp_path).name, "its disk hangs")
            return
        Neighbours(board, [0, 1]).join(attempt(tmp_path), [], may_share=True)

    outcome, _ = run_ranks(2, run)
    assert isinstance(outcome, CheckpointError)
    assert str(outcome).startswith("Rank 1: its disk hangs")


def test_a_rank_that_says_nothing_is_given_up_by_name(tmp_path: Path) -> None:
    def run(board: Board) -> None:
        if board.rank == 0:
            Neighbours(board, [0, 1]).join(attempt(tmp_path), [], may_share=True)

    outcome, _ = run_ranks(2, run, timeout_s=0.2)
    assert isinstance(outcome, TrainerError)
    assert "rank 1" in str(outcome)


def test_a_rank_that_is_alone_on_its_host_asks_nobody(tmp_path: Path) -> None:
    for ranks in ([], [0]):
        assert Neighbours(lone_board(), ranks).join(attempt(tmp_path), [], may_share=True) is None


def test_memory_is_had_by_address_only_where_that_is_still_the_same() -> None:
    first = SharedMemory.make()
    assert SharedMemory.open(first.address) is not None
    pid, number, name = first.address.split()
    assert SharedMemory.open(b" ".join([pid, number, b"00" * 16])) is None
    assert SharedMemory.open(b" ".join([b"999999999", number, name])) is None
    reader, writer = os.pipe()  # what another container's process has under that number
    assert SharedMemory.open(b" ".join([pid, str(reader).encode(), name])) is None
    os.close(reader)
    os.close(writer)
    first.close()


def test_a_full_strip_goes_to_one_of_those_that_claim_it() -> None:
    memory = SharedMemory.make()
    strip = Strip(3, 0, 4096, STRIPS_AT)
    memory.reach(STRIPS_AT + 4096, index=0, count=1)
    others = [SharedMemory.open(memory.address) for _ in range(3)]
    claims: list[memoryview] = []
    start = threading.Barrier(8)

    def claim(number: int) -> None:
        mine = others[number % 3]
        assert mine is not None
        mine.reach(STRIPS_AT + 4096, index=0, count=1)
        start.wait()
        for _ in range(200):
            if (found := mine.claim(strip)) is not None:
                claims.append(found)

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(8)]
    memory._counters[strip.number] = 4096
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claims) == 1
    assert not memory.is_full(strip)


def test_a_strip_that_nobody_writes_is_never_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim, lost = SharedMemory.claim, list[Strip]()

    def lose_one(self: SharedMemory, strip: Strip) -> memoryview | None:
        data = claim(self, strip)
        if data is not None and not lost:
            lost.append(strip)
            return None
        return data

    monkeypatch.setattr(SharedMemory, "claim", lose_one)
    for reports in save(tmp_path, COLUMNS, hosts=[[0, 1]], iterations=(1, 2)):
        assert "have not written every byte once" in str(reports[0].error)
        assert reports[1].error is None
    assert not (tmp_path / "iter_0000001").exists()
