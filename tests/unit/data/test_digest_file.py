"""Kept digests of token files: taken where they are of this very file, and never believed otherwise."""

from __future__ import annotations

import os
import random
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import device

from reprise.errors import DataError
from reprise.ranks import single_rank_channel
from tests.harness import TINY, compose
from tests.messages import refused
from trainer.data.digest_file import beside, digest_of, in_cache
from trainer.data.fingerprint import TokenDigest, scan
from trainer.data.token_file import TokenFile, open_token_file, write_token_file
from trainer.launch.process_group import Cluster
from trainer.run.run_data import open_data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return written(tmp_path / "data" / "a.bin", range(1000))


def written(path: Path, tokens: range) -> Path:
    """Write a file whose last change lies in the past by the clock of its file system."""
    write_token_file(path, [np.array(tokens)], dtype=np.uint16)
    probe = path.with_name("probe")
    deadline = time.monotonic() + 120.0
    while True:
        probe.write_bytes(b"")
        if probe.stat().st_mtime_ns > path.stat().st_ctime_ns:
            break
        assert time.monotonic() < deadline
    probe.unlink()
    return path


def look(path: Path, tmp_path: Path) -> tuple[TokenDigest, bool]:
    """Return the digest of a file, and whether its tokens were read for it."""
    file = open_token_file(path)
    read = list[int]()

    class Watched(TokenFile):
        def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
            read.append(start)
            return super().read(start, stop)

    file.__class__ = Watched
    return digest_of(file, cache=tmp_path / "cache"), bool(read)


def test_the_second_look_takes_what_the_first_has_found(path: Path, tmp_path: Path) -> None:
    expected = scan(open_token_file(path))
    assert look(path, tmp_path) == (expected, True)
    assert look(path, tmp_path) == (expected, False)
    assert sorted(found.name for found in path.parent.iterdir()) == [".a.bin.digest", "a.bin"]
    assert not (tmp_path / "cache").exists()


def test_a_file_that_cannot_have_one_beside_has_it_in_the_cache(path: Path, tmp_path: Path) -> None:
    beside(path).mkdir()  # also where the tests run as a user who may write anywhere
    expected = scan(open_token_file(path))
    assert look(path, tmp_path) == (expected, True)
    assert look(path, tmp_path) == (expected, False)
    kept = in_cache(path, path.stat(), tmp_path / "cache")
    assert [found for found in (tmp_path / "cache").rglob("*") if found.is_file()] == [kept]
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no folder")
    assert look(path, tmp_path) == look(path, tmp_path) == (expected, True)


def overwrite(path: Path, folder: Path) -> Path:
    with path.open("r+b") as file:
        file.seek(1500)
        file.write(b"\x07")
    return path


def put_in_place(path: Path, folder: Path) -> Path:
    return written(folder / "b.bin", range(1, 1001)).replace(path)


def copy_both(path: Path, folder: Path) -> Path:
    for source in (beside(path), path):
        copy = folder / source.name
        copy.write_bytes(source.read_bytes())
        os.utime(copy, ns=(0, source.stat().st_mtime_ns))
    return copy


@pytest.mark.parametrize("change", [overwrite, put_in_place, copy_both])
def test_another_file_of_the_same_size_and_time_is_read(
    path: Path, tmp_path: Path, change: Callable[[Path, Path], Path]
) -> None:
    before, _ = look(path, tmp_path)
    modified_ns = path.stat().st_mtime_ns
    other = change(path, tmp_path)
    os.utime(other, ns=(0, modified_ns))
    expected = scan(open_token_file(other))
    assert look(other, tmp_path) == (expected, True)
    assert (expected == before) is (change is copy_both)


def test_what_is_malformed_counts_for_nothing_and_is_replaced(path: Path, tmp_path: Path) -> None:
    expected, _ = look(path, tmp_path)
    good, chance = beside(path).read_bytes(), random.Random(4)
    broken = [b"", good[:-1], good + b"\n", good * 2, b"[" * 5000, bytes(200), good.replace(b" 1 ", b" 2 ", 1)]
    for _ in range(200):
        at = chance.randrange(len(good))
        broken.append(good[:at] + bytes([(good[at] + chance.randrange(1, 256)) % 256]) + good[at + 1 :])
    for data in broken:
        beside(path).write_bytes(data)
        assert look(path, tmp_path) == (expected, True)
        assert beside(path).read_bytes() == good
    # A pipe is not awaited. A link counts if its content is right.
    (tmp_path / "good").write_bytes(good)
    for make, is_new in (
        (lambda: beside(path).symlink_to(tmp_path / "good"), False),
        (lambda: os.mkfifo(beside(path)), True),
    ):
        beside(path).unlink()
        make()
        assert look(path, tmp_path) == (expected, is_new)
    assert stat.S_ISREG(beside(path).lstat().st_mode)


def test_a_file_that_is_written_to_while_it_is_read_is_refused(path: Path, tmp_path: Path) -> None:
    class Written(TokenFile):
        def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
            os.utime(self.path, ns=(0, 5))
            return super().read(start, stop)

    file = open_token_file(path)
    file.__class__ = Written
    with refused(DataError, "a.bin"):
        digest_of(file, cache=tmp_path / "cache")
    assert not beside(path).exists()


def test_no_digest_is_kept_of_a_file_changed_in_the_same_tick(path: Path, tmp_path: Path) -> None:
    """A change of status that lies ahead stands for a clock that has not moved on since the last write."""

    class Young(TokenFile):
        def status(self) -> os.stat_result:
            found = list(super().status().__reduce__()[1][0]), dict(super().status().__reduce__()[1][1])
            found[1]["st_ctime_ns"] = time.time_ns() + 10**9
            return os.stat_result(*found)

    file = open_token_file(path)
    file.__class__ = Young
    digest_of(file, cache=tmp_path / "cache")
    assert not beside(path).exists()
    assert not list(tmp_path.rglob("*.digest*"))


def test_a_second_start_reads_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, valid = (
        written(tmp_path / name, range(first, 250)) for first, name in enumerate(("train.bin", "valid.bin"))
    )
    keys = [f"data.train={train}", f"data.valid={valid}", "train.eval_interval=2"]
    cluster = Cluster(0, 1, device("cpu"), 1, single_rank_channel(), "nonce")
    fingerprints, read, counts = set[str](), TokenFile.read, list[int]()

    def counted(*call: Any) -> np.ndarray:
        counts[-1] += 1
        return read(*call)

    monkeypatch.setattr(TokenFile, "read", counted)
    for _ in range(2):
        counts.append(0)
        config = compose(["model=gpt2_tiny", "data=token_file", *TINY, *keys])
        fingerprints.add(open_data(config, cluster).record(config)["fingerprint"])
    assert len(fingerprints) == 1
    assert [bool(count) for count in counts] == [True, False]
