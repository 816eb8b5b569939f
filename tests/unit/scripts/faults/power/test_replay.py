"""What a disk holds after a power cut: the log of its writes and flushes, its replay, and what is looked for then."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from scripts.faults.power.block_log import Entry, LogKind, encode, read
from scripts.faults.power.logged_disk import LoggedDisk, Opcode, Request
from scripts.faults.power.mounting import FILE_SYSTEMS, make, repair
from scripts.faults.power.recording import Recording, StartDisk, saved_in
from scripts.faults.power.replay import SECTOR_BYTES, PowerCut, Replay, Survival
from scripts.faults.soak_power import cut_in_the_middle, lost, recorded_saves

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
    flushed = folder / "flushed"
    flushed.write_bytes(bytes(pages * PAGE))
    replay = Replay(log, flushed)
    replay.advance(cut.entries)
    replay.make(cut, folder / "image")
    replay.close()
    return (folder / "image").read_bytes()


class TestTheLog:
    def test_entries_are_read_as_they_were_written(self, tmp_path: Path) -> None:
        log = [Entry(LogKind.WRITE, 512, b"abc"), Entry(LogKind.FLUSH, 1), Entry(LogKind.SAID, 0, b"saved\n")]
        path = tmp_path / "log"
        path.write_bytes(b"".join(map(encode, log)))
        assert [Entry(found.kind, found.at, bytes(found.data)) for found in read(path)] == log


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

    def test_a_log_makes_the_disks_of_many_cuts_on_the_way(self, tmp_path: Path) -> None:
        flushed, image = tmp_path / "many", tmp_path / "image"
        flushed.write_bytes(bytes(4 * PAGE))
        replay = Replay(self.LOG, flushed)
        for entries in range(len(self.LOG) + 1):
            replay.advance(entries)
            for survival in Survival:
                cut = PowerCut(entries, survival, entries)
                replay.make(cut, image)
                found = image.read_bytes()
                assert found == disk_after(list(self.LOG), cut, tmp_path)
        replay.close()


@pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="mkfs.ext4 is not installed")
def test_a_half_written_ext4_superblock_is_repaired(tmp_path: Path) -> None:
    def is_clean() -> bool:
        return subprocess.run(["e2fsck", "-f", "-n", str(image)], capture_output=True, check=False).returncode == 0

    image, system = tmp_path / "image", FILE_SYSTEMS["ext4-writeback"]
    make(system, image)
    assert is_clean()
    with image.open("r+b") as file:
        file.seek(1024 + SECTOR_BYTES)
        file.write(bytes(SECTOR_BYTES))
    assert not is_clean()
    assert repair(system, image)
    assert is_clean()
    assert not repair(FILE_SYSTEMS["xfs"], image)


class TestWhatIsLookedFor:
    def test_a_save_is_told_where_its_line_ends(self) -> None:
        said = [b"step 1\nsaved iter", b"ation 2 in 0.1 s\nsaved iteration 4 in 0.2", b" s\n"]
        log = [Entry(LogKind.SAID, 0, text) for text in said]
        log.insert(1, Entry(LogKind.FLUSH, 0))
        saved = saved_in(log)
        assert saved == [(2, 2), (3, 4)]
        recording = Recording(StartDisk(Path(), (1,)), log, saved)
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

    def test_a_job_goes_on_from_a_cut_with_what_was_saved_before_it(self, tmp_path: Path) -> None:
        blank, disk = tmp_path / "blank", tmp_path / "disk"
        blank.write_bytes(bytes(4 * PAGE))
        log = [
            entry for letter in "abcd" for entry in (Entry(LogKind.WRITE, 0, page(letter)), Entry(LogKind.FLUSH, 99))
        ]
        recording = Recording(StartDisk(blank, (1,)), log, [(1, 2), (3, 4), (5, 6), (7, 8)])
        seen = set()
        for seed in range(40):
            start = cut_in_the_middle(recording, disk, random.Random(seed))
            assert start is not None
            seen.add((start.told, disk.read_bytes()[:1]))
            assert blank.read_bytes() == bytes(4 * PAGE)
        assert seen == {((1, 2, 4), b"b"), ((1, 2, 4), b"c"), ((1, 2, 4, 6), b"c")}
        assert cut_in_the_middle(Recording(StartDisk(blank), log, []), disk, random.Random(0)) is None

    def test_the_saves_that_a_damaged_metrics_file_records_are_read(self, tmp_path: Path) -> None:
        metrics = tmp_path / "metrics.jsonl"
        assert recorded_saves(metrics) == []
        save = b'{"iteration": %d, "event": "save"}'
        others = [b'{"iteration": 5}', b'{"iteration": 6, "event": "evaluation"}', b"[1]", b"7", bytes(9), b"\xff"]
        metrics.write_bytes(b"\n".join([save % 2, *others, save % 4, save[:20]]))
        assert recorded_saves(metrics) == [2, 4]
