"""A folder of a group: whoever of the group writes next can write to all that another has left."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import reprise
from reprise.storage.holds import Hold
from trainer.follow.follower import Follower
from trainer.metrics.jsonl_file import JsonlFile

_GROUP = 4242


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """Give the umask of hosts with groups."""
    before = os.umask(0o002)
    yield
    os.umask(before)


def write_all(folder: Path, first: int) -> None:
    """Write each kind of file that a run shares with the next one."""
    model = nn.Linear(2, 2)
    reprise.save(folder / "run", model, iteration=first, max_checkpoint_keep=1)
    with reprise.AsyncSaver(folder / "run", max_checkpoint_keep=1) as saver:
        saver.save(first + 1, model)
    hold = Hold.take(folder / "run" / f"iter_{first + 1:07d}")
    assert hold is not None
    JsonlFile(folder / "metrics.jsonl", lambda: 0.0).write({"iteration": first})
    Follower(folder, ["true"], first=first + 9).follow(once=True)


def test_the_umask_decides_who_may_write(tmp_path: Path) -> None:
    write_all(tmp_path, 1)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert set(modes.values()) == {0o664}, modes
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_dir()} == {0o775}


def as_user(number: int, call: Callable[[], None]) -> int:
    """Make a call as another user of the group in a child process, and return its status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        os.setgroups([])
        os.setgid(_GROUP)
        os.setuid(number)
        torch.set_num_threads(1)
        call()
        status = 0
    except BaseException:  # noqa: BLE001 - the child of a test goes no further
        traceback.print_exc()
    finally:
        os._exit(status)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_second_user_of_a_group_goes_on_with_a_run(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(folder.stat().st_mode | 0o011)  # pytest's folders are its user's own
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chown(shared, 0, _GROUP)
    shared.chmod(0o2775)
    assert as_user(4243, lambda: write_all(shared, 1)) == 0
    assert as_user(4244, lambda: write_all(shared, 3)) == 0
    assert [path.name for path in shared.glob("run/iter_*")] == ["iter_0000004"]
