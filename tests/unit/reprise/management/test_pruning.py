"""`reprise.prune`: which checkpoints are deleted, and when none is."""

from __future__ import annotations

from pathlib import Path

import pytest

import reprise
from reprise.errors import CheckpointError, ConfigError, LockError
from reprise.storage.lock import FolderLock
from tests.local_folders import save_on_two_hosts
from tests.messages import refused
from tests.unit.reprise.management.test_listing import save


def test_the_newest_the_pinned_and_the_multiples_stay(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, 2, 3, 4, 5)
    (folder / "iter_0000001" / "hold").touch()
    plan = reprise.prune(folder, keep=1, retain_interval=4, dry_run=True)
    assert ([e.iteration for e in plan.expired], plan.retained, plan.is_dry_run) == ([2, 3], (1, 4, 5), True)
    assert all(checkpoint.path.is_dir() and checkpoint.total_bytes > 0 for checkpoint in plan.expired)
    report = reprise.prune(folder, keep=1, retain_interval=4)
    assert (report.expired, report.is_dry_run) == (plan.expired, False)
    assert [summary.iteration for summary in reprise.list(folder)] == [1, 4, 5]
    assert not list(folder.glob(".*"))


def test_a_folder_that_a_run_saves_to_is_not_touched(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, 2)
    lock = FolderLock(folder, "a run")
    lock.acquire()
    with pytest.raises(LockError):
        reprise.prune(folder, keep=1)
    lock.release()
    assert len(reprise.list(folder)) == 2


def test_nothing_is_deleted_where_no_whole_checkpoint_would_stay(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 1, 2)
    (folder / "iter_0000002" / "trainer_state.json").unlink()
    with refused(CheckpointError, str(folder)):
        reprise.prune(folder, keep=1)
    assert len(reprise.list(folder)) == 2
    host, _ = save_on_two_hosts(tmp_path, 1, 2)
    with refused(CheckpointError, "max_checkpoint_keep"):
        reprise.prune(host, keep=1)


@pytest.mark.parametrize("numbers", [{"keep": 0}, {"keep": 1, "retain_interval": -1}])
def test_numbers_out_of_range_are_refused(tmp_path: Path, numbers: dict[str, int]) -> None:
    with refused(ConfigError, *(str(value) for value in numbers.values())):
        reprise.prune(save(tmp_path, 1), **numbers)  # type: ignore[arg-type]
