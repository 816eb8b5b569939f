"""What a disk holds after a power cut: the log of its writes and flushes, its replay, and what is looked for then."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from scripts.faults.power.block_log import Entry, LogKind, read
from scripts.faults.power.logged_disk import LoggedDisk, Opcode, Request
from scripts.faults.power.recording import Recording
from scripts.faults.power.replay import SECTOR_BYTES, PowerCut, Survival, write_disk
from scripts.faults.soak_power import lost

PAGE = 4096
DISK_NODE, SAID_NODE = 2, 3


def page(letter: str) -> bytes:
    return letter.encode() * PAGE


def writing(offset: int, data: bytes, *, node: int = DISK_NODE) -> Request:
    return Request(Opcode.WRITE, 1, node, struct.pack("<QQIIQII", 0, offset, len(data), 0, 0, 0, 0) + data)


def syncing() -> Request:
    return Request(Opcode.FSYNC, 2, DISK_NODE, b"")


def disk_after(log: list[Entry], cut: PowerCut, folder: Path, *, pages: int = 4) -> bytes:
    """Return the content of a disk, which was all zeros, after a cut."""
    (folder / "start").write_bytes(bytes(pages * PAGE))
    write_disk(log, cut, folder / "start", folder / "image")
    return (folder / "image").read_bytes()


class TestTheLoggedDisk:
    @pytest.fixture
    def image(self, tmp_path: Path) -> Path:
        path = tmp_path / "image"
        path.write_bytes(bytes(4 * PAGE))
        return path

    @pytest.fixture
    def disk(self, tmp_path: Path, image: Path) -> LoggedDisk:
        return LoggedDisk(os.open(image, os.O_RDWR), os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND))

    def test_a_flush_covers_writes_answered_before_its_request(self, disk: LoggedDisk, tmp_path: Path) -> None:
        disk.answer_all([writing(0, page("a"))])
        disk.answer_all([writing(PAGE, page("b")), syncing(), writing(0, page("c"))])
        disk.answer_all([syncing()])
        log = read(tmp_path / "log")
        assert [(entry.kind, entry.at) for entry in log] == [
            (LogKind.WRITE, 0),
            (LogKind.WRITE, PAGE),
            (LogKind.FLUSH, 1),
            (LogKind.WRITE, 0),
            (LogKind.FLUSH, 4),
        ]

    def test_writes_are_read_back_and_notes_keep_their_place(
        self, disk: LoggedDisk, image: Path, tmp_path: Path
    ) -> None:
        answers = disk.answer_all([writing(PAGE, page("a")), writing(0, b"saved\n", node=SAID_NODE)])
        assert [struct.unpack_from("<IiQI", answer)[1:] for answer in answers] == [(0, 1, PAGE), (0, 1, 6)]
        reading = Request(Opcode.READ, 3, DISK_NODE, struct.pack("<QQIIQII", 0, PAGE, PAGE, 0, 0, 0, 0))
        assert disk.answer_all([reading])[0][16:] == page("a") == image.read_bytes()[PAGE : 2 * PAGE]
        assert [bytes(entry.data) for entry in read(tmp_path / "log")] == [page("a"), b"saved\n"]


class TestACut:
    LOG = (
        Entry(LogKind.WRITE, 0, page("a")),
        Entry(LogKind.WRITE, PAGE, page("b")),
        Entry(LogKind.FLUSH, 1),  # "b" was in flight
        Entry(LogKind.WRITE, 0, page("c")),
        Entry(LogKind.WRITE, 2 * PAGE, page("d")),
        Entry(LogKind.FLUSH, 5),
    )

    @pytest.mark.parametrize(
        ("entries", "survival", "content"),
        [
            (2, Survival.none, "...."),
            (2, Survival.all, "ab.."),
            (3, Survival.none, "a..."),
            (3, Survival.all, "ab.."),
            (5, Survival.none, "a..."),
            (5, Survival.all, "cbd."),
            (6, Survival.none, "cbd."),
        ],
    )
    def test_what_was_flushed_is_there_and_of_the_rest_none_or_all(
        self, tmp_path: Path, entries: int, survival: Survival, content: str
    ) -> None:
        expected = b"".join(page(letter) for letter in content.replace(".", "\0"))
        assert disk_after(list(self.LOG), PowerCut(entries, survival, 0), tmp_path) == expected

    def test_every_subset_of_unflushed_writes_comes_and_flushed_stay(self, tmp_path: Path) -> None:
        seen, torn = set(), 0
        for seed in range(200):
            data = disk_after(list(self.LOG), PowerCut(5, Survival.some, seed), tmp_path)
            sectors = [data[at : at + SECTOR_BYTES] for at in range(0, len(data), SECTOR_BYTES)]
            assert all(len(set(sector)) == 1 for sector in sectors)  # a sector is whole or not there
            letters = [{sector[:1] for sector in sectors[at : at + 8]} for at in range(0, 32, 8)]
            assert letters[0] <= {b"a", b"c"}
            assert letters[1] <= {b"\0", b"b"}
            assert letters[2] <= {b"\0", b"d"}
            assert letters[3] == {b"\0"}
            torn += any(len(found) > 1 for found in letters)
            seen.add((b"c" in letters[0], b"b" in letters[1], b"d" in letters[2]))
        assert len(seen) == 8
        assert torn > 10


class TestWhatIsLookedFor:
    def test_a_save_is_told_where_its_line_ends(self) -> None:
        said = [b"step 1\nsaved iter", b"ation 2 in 0.1 s\nsaved iteration 4 in 0.2", b" s\n"]
        log = [Entry(LogKind.SAID, 0, text) for text in said]
        log.insert(1, Entry(LogKind.FLUSH, 0))
        recording = Recording(Path(), [1], log)
        assert recording.saved() == [(2, 2), (3, 4)]
        told = [recording.told(PowerCut(entries, Survival.none, 0)) for entries in range(5)]
        assert told == [[1], [1], [1], [1, 2], [1, 2, 4]]

    @pytest.mark.parametrize(
        ("told", "committed", "missing"),
        [
            ([2, 4], [2, 4], []),
            ([2, 4], [4], [2]),
            ([2, 4], [4, 6], []),
            ([2, 4, 6], [4], [2, 6]),
            ([2, 4, 6], [], [2, 4, 6]),
            ([], [2], []),
        ],
    )
    def test_a_reported_save_is_there_or_replaced_by_newer_ones(
        self, told: list[int], committed: list[int], missing: list[int]
    ) -> None:
        assert lost(told, committed, keep=2) == missing
