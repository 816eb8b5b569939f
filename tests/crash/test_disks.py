"""Full, failing, read-only and missing disks: training goes on, what is committed stays, saving begins again."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.crash import troubles
from tests.harness import TINY, Ended, all_files, call_on_ranks, curve, run_ok

# Saves at 2, 4, 6 and 8, and 10 at the end; the trouble begins before 5 and ends before 9.
BASE = ("model=gpt2_tiny", *TINY, "train.train_iters=10", "checkpoint.save_interval=2")
BEGINS, ENDS = 5, 9
SLOW_2 = pytest.param(2, marks=[pytest.mark.slow, pytest.mark.nightly])


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the run without trouble."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    assert train(folder, {"name": "deleted folder"}, begins=98, ends=99).ok
    return folder


def mount(kind: str, source: str, path: Path, options: str) -> None:
    """Mount, or skip the test with the reason why that cannot be done."""
    command = ["mount", "-t", kind, "-o", options, source, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of 3 MiB, in which some checkpoints of the tiny model have room."""
    path = tmp_path / "disk"
    path.mkdir()
    mount("tmpfs", "tmpfs", path, "size=3m")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def run_that_may_be_covered(tmp_path: Path) -> Iterator[Path]:
    """Return the folder of a run whose checkpoints may have something mounted over them."""
    probe = tmp_path / "probe"
    probe.mkdir()
    mount("tmpfs", "tmpfs", probe, "size=4k,ro")
    subprocess.run(["umount", str(probe)], check=True)
    yield tmp_path / "run"
    subprocess.run(["umount", "--lazy", str(tmp_path / "run/checkpoints")], check=False, capture_output=True)


def train(
    run: Path,
    trouble: dict[str, object],
    *,
    ranks: int = 1,
    rank: int = 0,
    begins: int = BEGINS,
    ends: int = ENDS,
    overrides: Sequence[str] = (),
    logs: Path | None = None,
) -> Ended:
    """Run the trainer with a trouble; the output goes beside `logs`, where the disk of the run is the trouble."""
    told = json.dumps({"rank": rank, "begins": begins, "ends": ends, **trouble})
    arguments = [told, f"run.dir={run}", *BASE, *overrides]
    return call_on_ranks(troubles.main, arguments, folder=logs or run, ranks=ranks)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir())


def folders(*iterations: int) -> list[str]:
    return [f"iter_{iteration:07d}" for iteration in iterations]


def tensors(run: Path, iteration: int) -> dict[str, bytes]:
    found = all_files(run / "checkpoints" / f"iter_{iteration:07d}")
    return {name: data for name, data in found.items() if name not in ("manifest.json", "trainer_state.json")}


def assert_only_some_saves_failed(run: Path, ended: Ended, unbroken: Path, *, lost: tuple[int, ...] = (6, 8)) -> None:
    """Hold a run with trouble to the one without: all else is the same."""
    assert ended.ok, ended.text
    failed = [line for line in ended.outputs[0].splitlines() if "was not saved" in line]
    assert [line.split(" was not saved")[0] for line in failed] == [f"iteration {number}" for number in lost]
    assert names(run) == folders(*(number for number in (2, 4, 6, 8, 10) if number not in lost))
    assert (run / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "10\n"
    assert [row[:2] for row in curve(run)] == [row[:2] for row in curve(unbroken)]
    for number in (2, 4, 10):
        assert tensors(run, number) == tensors(unbroken, number)


def assert_told(ended: Ended, *words: str) -> None:
    """Hold each line of a failed save to what it must name."""
    lines = [line for line in ended.outputs[0].splitlines() if "was not saved" in line]
    assert lines
    for line in lines:
        assert [word for word in words if word not in line] == [], line


def test_a_disk_that_fills_up_is_told_before_the_first_byte(small_disk: Path, unbroken: Path) -> None:
    run = small_disk / "run"
    ended = train(run, {"name": "full disk", "is_unforeseen": False}, logs=small_disk.with_name("log"))
    assert_only_some_saves_failed(run, ended, unbroken)
    assert_told(ended, "There is no room for a checkpoint", str(run / "checkpoints"), " B free", "found 0 B free")


@pytest.mark.parametrize("is_full_to_the_last_byte", [False, True])
def test_a_smaller_number_to_keep_makes_room_at_the_next_start(
    small_disk: Path, is_full_to_the_last_byte: bool
) -> None:
    run, log = small_disk / "run", small_disk.with_name("log")
    command = [f"run.dir={run}", *BASE, "train.train_iters=40", "schedule.lr_decay_iters=40"]
    full = call_on_ranks(troubles.train, command, folder=log, ranks=1)
    assert full.statuses == (1,)
    assert "There is no room for a checkpoint" in full.text
    assert "deleted by the next start with checkpoint.max_checkpoint_keep=1." in full.text
    kept = names(run)
    newest = int(kept[-1].removeprefix("iter_"))
    assert len(kept) > 2
    assert newest < 40
    if is_full_to_the_last_byte:
        troubles.fill(small_disk)
    again = call_on_ranks(troubles.train, [*command, "checkpoint.max_checkpoint_keep=2"], folder=log, ranks=1)
    assert again.ok, again.text
    assert f"iteration {newest} from" in again.text
    assert "deleted iteration 2, which checkpoint.max_checkpoint_keep=2 does not keep" in again.text
    assert "was not saved" not in again.text
    assert names(run) == folders(38, 40)
    assert [row[0] for row in curve(run)] == list(range(1, 41))


def test_records_wait_until_there_is_room_for_them_again(small_disk: Path) -> None:
    run = small_disk / "run"
    overrides = ["train.train_iters=30", "checkpoint.max_checkpoint_keep=2"]
    trouble = {"name": "full disk", "is_unforeseen": False}
    ended = train(run, trouble, ends=27, overrides=overrides, logs=small_disk.with_name("log"))
    assert ended.ok, ended.text
    assert ended.text.count("its lines wait in memory: [Errno 28] No space left on device") == 1
    assert [row[0] for row in curve(run)] == list(range(1, 31))
    assert names(run) == folders(28, 30)


@pytest.mark.parametrize("ranks", [1, SLOW_2])
def test_a_disk_that_is_full_without_warning_fails_only_the_save(small_disk: Path, unbroken: Path, ranks: int) -> None:
    run = small_disk / "run"
    trouble = {"name": "full disk", "is_unforeseen": True}
    ended = train(run, trouble, ranks=ranks, logs=small_disk.with_name("log"))
    if ranks == 1:
        assert_only_some_saves_failed(run, ended, unbroken)
    assert ended.ok, ended.text
    assert names(run) == folders(2, 4, 10)
    assert_told(ended, "(errno 28)", ".partial", "expected room for ", " B free")
    assert [row[0] for row in curve(run)] == list(range(1, 11))


def test_files_that_may_not_grow_fail_only_the_save(tmp_path: Path, unbroken: Path) -> None:
    run = tmp_path / "run"
    ended = train(run, {"name": "small files", "limit": 20_000})
    assert_only_some_saves_failed(run, ended, unbroken)
    assert_told(ended, "File too large (errno 27)", ".partial", "expected room for ", " B free")


def test_a_folder_that_becomes_read_only_fails_only_the_save(run_that_may_be_covered: Path, unbroken: Path) -> None:
    run = run_that_may_be_covered
    ended = train(run, {"name": "read-only"})
    assert_only_some_saves_failed(run, ended, unbroken)
    assert_told(ended, "Read-only file system (errno 30)", ".partial", "expected room for ", " B free")


@pytest.mark.parametrize("ranks", [1, SLOW_2])
def test_a_folder_deleted_while_training_is_used_once_it_is_back(tmp_path: Path, unbroken: Path, ranks: int) -> None:
    run = tmp_path / "run"
    ended = train(run, {"name": "deleted folder"}, ranks=ranks)
    assert ended.ok, ended.text
    assert_told(ended, "No such file or directory (errno 2)", str(run / "checkpoints"))
    assert ended.outputs[0].count("was not saved") == 2
    assert names(run) == folders(10)
    assert sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_file()) == [
        "latest_checkpointed_iteration.txt",
        "lock",
    ]
    if ranks == 1:
        assert tensors(run, 10) == tensors(unbroken, 10)
        assert curve(run) == curve(unbroken)


CALLS = [
    ("make_folder", errno.EROFS),
    ("open_for_writing", errno.EACCES),
    ("reserve", errno.EDQUOT),
    ("write", errno.EIO),
    ("sync", errno.EIO),
    ("write_new", errno.EDQUOT),
    ("sync_folder", errno.EIO),
    ("rename", errno.EIO),
]
QUICK = ("write_new",)
OF_EVERY_RANK = ("make_folder", "open_for_writing", "reserve", "write", "sync")


@pytest.mark.parametrize(
    ("kind", "code"),
    [pytest.param(*call, marks=() if call[0] in QUICK else [pytest.mark.slow, pytest.mark.nightly]) for call in CALLS],
)
def test_a_call_that_fails_fails_only_the_save(tmp_path: Path, unbroken: Path, kind: str, code: int) -> None:
    run = tmp_path / "run"
    ended = train(run, {"name": "failing call", "kind": kind, "code": code})
    assert_only_some_saves_failed(run, ended, unbroken)
    assert_told(ended, f"{os.strerror(code)} (errno {code})", "iter_000000", "expected room for ", " B free")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.nightly), 1])
@pytest.mark.parametrize(("kind", "code"), [call for call in CALLS if call[0] in OF_EVERY_RANK])
def test_a_failing_call_on_one_rank_of_two_fails_only_the_save(tmp_path: Path, kind: str, code: int, rank: int) -> None:
    run = tmp_path / "run"
    ended = train(run, {"name": "failing call", "kind": kind, "code": code}, ranks=2, rank=rank)
    assert ended.ok, ended.text
    assert names(run) == folders(2, 4, 10)
    assert_told(ended, f"{os.strerror(code)} (errno {code})", "iter_000000", "expected room for ", " B free")
    assert [row[0] for row in curve(run)] == list(range(1, 11))


@pytest.mark.parametrize(("ranks", "rank"), [pytest.param(1, 0, marks=pytest.mark.slow), (2, 1)])
def test_so_many_failed_saves_in_a_row_end_the_run_on_all_ranks(tmp_path: Path, ranks: int, rank: int) -> None:
    run = tmp_path / "run"
    trouble = {"name": "failing call", "kind": "sync", "code": errno.EIO}
    overrides = ["checkpoint.exit_on_save_failure=2", "train.train_iters=30"]
    ended = train(run, trouble, ranks=ranks, rank=rank, ends=31, overrides=overrides)
    assert ended.statuses == (1,) * ranks
    assert "Saving failed too often in a row" in ended.outputs[0]
    # All ranks agree on it with the next iteration's figures; a save that is due by then is tried as well.
    assert re.search(r"checkpoint\.exit_on_save_failure=2, found [23] failed saves", ended.outputs[0])
    assert "Input/output error (errno 5)" in ended.outputs[0]
    assert names(run) == folders(2, 4)
    assert 9 <= curve(run)[-1][0] <= 11

    again = run_ok(run, [*BASE, "checkpoint.exit_on_save_failure=2", "schedule.lr_decay_iters=30"], ranks=ranks)
    assert "iteration 4 from" in again.outputs[0]
