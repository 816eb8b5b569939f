"""Full, failing, read-only and missing disks: training goes on, what is committed stays, saving begins again."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash import troubles
from tests.crash.outcomes import saved
from tests.harness import TINY, all_files, checkpoint, curve, launch, run_ok, tensor_files
from tests.profiles import nightly, slow

# Saves at 2, 4, 6 and 8, and 10 at the end; the trouble begins before 5 and ends before 9.
BASE = ("model=gpt2_tiny", *TINY, "train.train_iters=10", "checkpoint.save_interval=2")
WHILE = {"begins": 5, "ends": 9}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the run without trouble."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    run_ok(folder, BASE)
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of 3 MiB, in which some checkpoints of the tiny model have room; others may cover it."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", "--recursive", str(path)], check=True)


FULL = {"name": "full disk"}
ROOM = ("expected room for ", " B free")  # what a disk needs, and has


def failing(kind: str, code: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a call that fails, and what the line of a save that fails by it names."""
    return {"name": "failing call", "kind": kind, "code": code}, (f"(errno {code})", "iter_000000", *ROOM)


CALLS = [
    failing("make_folder", errno.EROFS),
    failing("open_for_writing", errno.EACCES),
    failing("reserve", errno.EDQUOT),
    failing("write", errno.EIO),
    failing("sync", errno.EIO),
    failing("sync_folder", errno.EIO),
    failing("rename", errno.EIO),
]
OF_EVERY_RANK = CALLS[:5]
TROUBLES = [
    # the trouble, what the line of each failed save names, how many ranks, over which it comes
    (FULL, ("found 0 B free",), 1, 0),
    ({**FULL, "is_unforeseen": True}, ("(errno 28)", ".partial", *ROOM), 1, 0),
    nightly({**FULL, "is_unforeseen": True}, ("(errno 28)", ".partial", *ROOM), 2, 0),
    ({"name": "small files", "limit": 20_000}, ("(errno 27)", ".partial", *ROOM), 1, 0),
    ({"name": "read only"}, ("(errno 30)", ".partial", *ROOM), 1, 0),
    ({"name": "deleted folder"}, ("(errno 2)", "/run/checkpoints"), 1, 0),
    nightly({"name": "deleted folder"}, ("(errno 2)", "/run/checkpoints"), 2, 0),
    (*failing("write_new", errno.EDQUOT), 1, 0),
    *(nightly(*call, 1, 0) for call in CALLS),
    *(slow(*call, 2, 1) for call in OF_EVERY_RANK),
    *(nightly(*call, 2, 0) for call in OF_EVERY_RANK),
]


@pytest.mark.parametrize(
    ("trouble", "words", "ranks", "rank"),
    TROUBLES,
    ids=lambda value: "names" if isinstance(value, tuple) else str(value),
)
def test_a_trouble_of_a_disk_fails_only_the_save(
    small_disk: Path, unbroken: Path, trouble: dict[str, Any], words: tuple[str, ...], ranks: int, rank: int
) -> None:
    run = small_disk / "run"
    logs = small_disk.with_name("log")
    ended = troubles.train(run, BASE, {**trouble, **WHILE, "rank": rank}, ranks=ranks, logs=logs)
    assert ended.ok, ended.text
    failed = [line for line in ended.outputs[0].splitlines() if "was not saved" in line]
    assert [re.findall(r"iteration (\d+) was", line) for line in failed] == [["6"], ["8"]]
    assert [(word, line) for line in failed for word in words if word not in line] == []
    kept = [10] if trouble["name"] == "deleted folder" else [2, 4, 10]
    assert saved(run) == kept
    files = sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_file())
    assert files == ["latest_checkpointed_iteration.txt", "lock"]
    assert (run / "checkpoints" / files[0]).read_text() == "10\n"
    assert [row[0] for row in curve(run)] == list(range(1, 11))
    if ranks == 1:
        assert [row[:2] for row in curve(run)] == [row[:2] for row in curve(unbroken)]
        for number in kept:
            assert tensor_files(checkpoint(run, number)) == tensor_files(checkpoint(unbroken, number))
            assert all_files(checkpoint(run, number)).keys() == all_files(checkpoint(unbroken, number)).keys()


@pytest.mark.parametrize("is_full_to_the_last_byte", [slow(False), True])
def test_a_smaller_number_to_keep_makes_room_at_the_next_start(
    small_disk: Path, is_full_to_the_last_byte: bool
) -> None:
    run, log = small_disk / "run", small_disk.with_name("log")
    command = [*BASE, "train.train_iters=40", "schedule.lr_decay_iters=40"]
    full = troubles.train(run, command, logs=log)
    assert full.statuses == (1,)
    assert "checkpoint.max_checkpoint_keep=1," in full.text
    kept = saved(run)
    assert len(kept) > 2
    assert kept[-1] < 40
    if is_full_to_the_last_byte:
        troubles.fill(small_disk)
    again = troubles.train(run, [*command, "checkpoint.max_checkpoint_keep=2"], logs=log)
    assert again.ok, again.text
    assert f"iteration {kept[-1]} from" in again.text
    assert "deleted iteration 2, which checkpoint.max_checkpoint_keep=2" in again.text
    assert "was not saved" not in again.text
    assert saved(run) == [38, 40]
    assert [row[0] for row in curve(run)] == list(range(1, 41))


def test_records_wait_until_there_is_room_for_them_again(small_disk: Path) -> None:
    run, overrides = (
        small_disk / "run",
        [*BASE, "train.train_iters=30", "checkpoint.max_checkpoint_keep=2", "checkpoint.exit_on_save_failure=0"],
    )
    ended = troubles.train(run, overrides, {**FULL, "begins": 5, "ends": 27}, logs=small_disk.with_name("log"))
    assert ended.ok, ended.text
    assert ended.text.count("[Errno 28]") == 1
    assert [row[0] for row in curve(run)] == list(range(1, 31))
    assert saved(run) == [28, 30]


@pytest.mark.parametrize(("train_iters", "limit"), [(6, 0), (30, 5)])
def test_a_run_whose_every_save_fails_ends_with_1(tmp_path: Path, train_iters: int, limit: int) -> None:
    trouble = {**failing("sync", errno.EIO)[0], "begins": 1, "ends": 31}
    until = [f"train.train_iters={train_iters}", f"checkpoint.exit_on_save_failure={limit}"]
    ended = troubles.train(tmp_path / "run", [*BASE, *until], trouble)
    assert ended.statuses == (1,)
    assert saved(tmp_path / "run") == []
    counts = "3" if train_iters == 6 else "[56]"
    last = ended.outputs[0].strip().splitlines()[-1]
    begin = "CheckpointError: The last saves of the run failed"
    assert re.match(rf"{begin}.*, found {counts} failed saves, the last: .*{os.strerror(errno.EIO)}", last)
    assert f"(0: none) is checkpoint.exit_on_save_failure={limit}." in last


@pytest.mark.parametrize(("ranks", "rank"), [slow(1, 0), (2, 1)])
def test_so_many_failed_saves_in_a_row_end_the_run_on_all_ranks(tmp_path: Path, ranks: int, rank: int) -> None:
    run, limit = tmp_path / "run", "checkpoint.exit_on_save_failure=2"
    trouble = {**failing("sync", errno.EIO)[0], "rank": rank, "begins": 5, "ends": 31}
    ended = troubles.train(run, [*BASE, limit, "train.train_iters=30"], trouble, ranks=ranks)
    assert ended.statuses == (1,) * ranks
    # All ranks agree on it with the next iteration's figures; a save that is due by then is tried as well.
    assert re.search(rf"found [23] failed saves.*{re.escape(limit)}", ended.outputs[0])
    assert f"{os.strerror(errno.EIO)} (errno {errno.EIO})" in ended.outputs[0]
    assert saved(run) == [2, 4]
    assert 9 <= curve(run)[-1][0] <= 11
    again = launch(run, [*BASE, limit, "schedule.lr_decay_iters=30"], ranks=ranks)
    assert "iteration 4 from" in again.outputs[0]
