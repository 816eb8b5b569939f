"""Holds: whose protect a folder, for how long, and who wins where a hold and a deletion meet."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reprise.format.names import STATE
from reprise.saving.policy import Retention
from reprise.saving.retention import decide_expired, delete
from reprise.storage import holds as holds_module
from reprise.storage import json_file
from reprise.storage.files import Files
from reprise.storage.folder import CheckpointFolder, iteration_name
from reprise.storage.holds import EXPIRY_S, HOLD, Hold, is_held
from reprise.storage.lease import Holder
from tests import ROOT

LIMIT_S = 120.0
HOLDER = """
import sys
from pathlib import Path
from typing import Any
from reprise.storage.holds import Hold

hold = Hold.take(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets the clock of the file system."""
    return lambda now: monkeypatch.setattr(holds_module, "file_system_time", lambda _: now)


def folder_with(root: Path, *iterations: int) -> CheckpointFolder:
    for iteration in iterations:
        (root / iteration_name(iteration)).mkdir(parents=True)
        (root / iteration_name(iteration) / "content").touch()
    return CheckpointFolder(root, Files())


def test_a_hold_lasts_until_it_is_released(tmp_path: Path) -> None:
    assert not is_held(tmp_path)
    hold = Hold.take(tmp_path)
    assert hold is not None
    assert hold.path.exists()
    assert hold.path.name.startswith(f"hold.{os.getpid()}.")
    assert is_held(tmp_path)
    hold.release()
    hold.release()
    assert not is_held(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_heartbeat_renews_a_hold(tmp_path: Path) -> None:
    hold = Hold.take(tmp_path)
    assert hold is not None
    os.utime(hold.path, (0, 0))
    hold.beat()
    assert hold.path.stat().st_mtime
    hold.release()


def test_a_file_of_the_exact_name_holds_until_it_is_removed(tmp_path: Path) -> None:
    for name in ("hold.txt", "hold.1.txt", "holdings", ".hold", "hold.", "hold.1.XY"):
        (tmp_path / name).touch()
    assert not any(map(is_held, (tmp_path, tmp_path / "none", tmp_path / "holdings")))
    (tmp_path / HOLD).touch()
    os.utime(tmp_path / HOLD, (0, 0))
    assert is_held(tmp_path)


def test_the_hold_of_a_process_ends_with_it(tmp_path: Path, clock: Callable[[float], None]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        process.send_signal(signal.SIGSTOP)
        clock(1e12)  # however long it stands still
        is_held_by_it = is_held(tmp_path)
        process.kill()
        process.wait(LIMIT_S)
    assert is_held_by_it
    clock(0.0)
    assert not is_held(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


ELSEWHERE = json.dumps(Holder("another", 7, "ab", 1.0)._asdict())
SAME_NAME = json.dumps(Holder(f"{socket.gethostname()} another-boot", 7, "ab", 1.0)._asdict())
OF_0_2 = '{"host": "a", "pid": 7, "started": 5, "boot": "b", "namespace": "pid:[1]"}'


@pytest.mark.parametrize("content", [ELSEWHERE, SAME_NAME, OF_0_2, "", '{"host": "a", "pid"', "[1]", "\xff"])
def test_elsewhere_or_torn_a_hold_lasts_as_long_as_its_heartbeat(
    tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch, clock: Callable[[float], None]
) -> None:
    (tmp_path / "hold.7").write_text(content, encoding="latin-1")
    os.utime(tmp_path / "hold.7", (5000.0, 5000.0))
    assert not is_held(tmp_path)  # by the clock of the file system
    # The last clock was set back.
    for now, is_valid in ((5000.0 + EXPIRY_S - 1, True), (5000.0 + EXPIRY_S, False), (1000.0, True)):
        clock(now)
        assert is_held(tmp_path) == is_valid

    def fail(path: Path) -> Any:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(holds_module, "file_system_time", fail)
    assert is_held(tmp_path)
    monkeypatch.setattr(Path, "iterdir", fail)
    assert is_held(tmp_path)


def test_a_dead_process_of_a_container_here_holds_nothing(tmp_path: Path) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    host = f"{socket.gethostname()} {boot}"  # whatever its process namespace: a container's restart makes a new one
    (tmp_path / "hold.7.ab").write_text(json.dumps(Holder(host, 7, "ab", 1.0)._asdict()))
    assert not is_held(tmp_path)


def test_without_flock_the_heartbeat_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Callable[[float], None]
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    hold = Hold.take(tmp_path)
    assert hold is not None
    assert is_held(tmp_path)
    clock(time.time() + EXPIRY_S + 60)
    assert not is_held(tmp_path)
    hold.release()


def test_a_folder_that_is_not_there_cannot_be_held(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert [Hold.take(tmp_path / name) for name in ("none", "file")] == [None, None]


@pytest.mark.parametrize("moment", ["before the decision", "before the deletion", "before the rename", "after it"])
def test_a_hold_wins_until_the_folder_is_renamed(tmp_path: Path, moment: str) -> None:
    holds, renamed = list[Hold | None](), list[Path]()

    class Acting(Files):
        """Files that hold a folder once, beside its rename."""

        def rename(self, source: Path, target: Path) -> None:
            if moment == "before the rename" and not holds:
                holds.append(Hold.take(source))
            super().rename(source, target)
            renamed.append(source)
            if moment == "after it":
                holds.append(Hold.take(source))

    folder = replace(folder_with(tmp_path, 1, 2, 3), files=Acting())
    if moment == "before the decision":
        holds.append(Hold.take(folder.iteration(1)))
    expired = decide_expired(folder, Retention(2))
    assert expired == ([] if moment == "before the decision" else [1])
    if moment == "before the deletion":
        holds.append(Hold.take(folder.iteration(1)))
    is_too_late = moment == "after it"
    assert delete(folder, [1], attempt="n-1", lock=None) == [1] * is_too_late
    (hold,) = holds
    if is_too_late:
        assert hold is None
        assert sorted(path.name for path in tmp_path.iterdir()) == [iteration_name(2), iteration_name(3)]
        return
    assert moment == "before the rename" or renamed == []  # its reader does not miss it for a moment
    assert hold is not None
    assert hold.path.exists()
    assert (folder.iteration(1) / "content").exists()
    assert folder.committed() == [1, 2, 3]
    hold.release()
    assert delete(folder, [1], attempt="n-2", lock=None) == [1]


def test_a_hold_follows_a_checkpoint_that_is_superseded(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 1)
    hold = Hold.take(folder.iteration(1))
    assert hold is not None
    (renamed,) = folder.supersede([1])
    assert not hold.path.exists()
    assert is_held(renamed)
    hold.release()
    assert [path.name for path in renamed.iterdir()] == ["content"]


def test_a_replaced_checkpoint_that_is_held_is_kept(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 1)
    folder.partial(1, "n-1").mkdir()
    hold = Hold.take(folder.iteration(1))
    assert folder.commit(1, "n-1", replaces=True)
    (superseded,) = folder.superseded()
    assert hold is not None
    assert sorted(path.name for path in superseded.iterdir()) == ["content", hold.path.name]
    hold.release()


@pytest.mark.parametrize(
    ("left", "name"),
    [
        (".iter_0000001.n-1.deleting", "iter_0000001"),
        (".iter_0000002.n-1.deleting", "iter_0000002.superseded-1"),
        (".iter_0000002.n-1.outdated.replaced", "iter_0000002.superseded-1"),
    ],
)
def test_a_sweep_gives_what_is_held_its_name_back(tmp_path: Path, left: str, name: str) -> None:
    folder = folder_with(tmp_path, 2)
    (tmp_path / left).mkdir()
    hold = Hold.take(tmp_path / left)
    assert hold is not None
    assert folder.sweep() == []
    assert (tmp_path / name / hold.path.name).exists()
    hold.release()


def test_retention_reads_a_checkpoint_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, paths, read = folder_with(tmp_path, 1, 2, 3), list[Path](), json_file.read

    def listening(path: Path) -> json_file.Json:
        paths.append(path)
        return read(path)

    def expired(**losses: float) -> list[int]:
        for name, loss in losses.items():
            (tmp_path / name / STATE).write_text(json.dumps({"valid_loss": loss}))
        return decide_expired(folder, Retention(1, keep_best=1))

    monkeypatch.setattr(json_file, "read", listening)
    assert [expired(iter_0000001=1.0, iter_0000002=2.0, iter_0000003=3.0), expired()] == [[2], [2]]
    assert sorted(paths) == [folder.iteration(iteration) / STATE for iteration in (1, 2, 3)]
    # Another folder of the same name is another checkpoint; so is one filled again, of the same inode.
    folder.iteration(2).rename(tmp_path / "old")
    folder.iteration(2).mkdir()
    assert expired(iter_0000002=0.5) == [1]
    os.utime(folder.iteration(2), (1, 1))
    assert expired(iter_0000002=1.5) == [2]
    assert len(paths) == 5
