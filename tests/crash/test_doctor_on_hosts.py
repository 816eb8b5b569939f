"""The doctor on two hosts: whether they see one folder, and the way out where they do not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from reprise.storage import shared_folder
from tests.crash.hosts import Mount, on_hosts
from tests.harness import Ended, call_on_ranks
from trainer.commands import doctor
from trainer.config import terms
from trainer.doctor import looks

pytestmark = pytest.mark.slow


def run_doctor(arguments: list[str]) -> None:
    """Run the command with short writes and little patience."""
    looks._SAVED_BYTES = 1 << 20
    shared_folder.SEEN_WITHIN_S = 0.5
    sys.exit(doctor.main(arguments))


def look(folder: Path, tmp_path: Path, mounts: list[Mount], *, ranks: int = 2, ranks_per_host: int = 1) -> Ended:
    """Run the doctor on two hosts, of which the second has these mounts."""
    ranks_of = on_hosts(run_doctor, {1: mounts}, ranks_per_host=ranks_per_host)
    return call_on_ranks(ranks_of, [str(folder)], folder=tmp_path / "run", ranks=ranks)


@pytest.mark.parametrize("has_folder", [False, True], ids=["no such folder", "such a folder"])
def test_hosts_that_share_no_folder_are_named(tmp_path: Path, has_folder: bool) -> None:
    shared, other = tmp_path / "shared", tmp_path / "other"
    (shared / "runs").mkdir(parents=True)
    (other / "runs" if has_folder else other).mkdir(parents=True)
    ended = look(shared / "runs", tmp_path, [Mount(shared, other)])
    assert ended.statuses == (1, 1), ended.text
    line = ended.outputs[0].splitlines()[-1]
    assert line.startswith(f"MISSING  one folder for all hosts     {shared / 'runs'}/.doctor-")
    assert " of rank 0 cannot be seen by host host1: No such file or directory. Mount the same" in line
    assert line.endswith(terms.WAY_OUT)
    assert sorted(path.name for path in [*shared.rglob("*"), *other.rglob("*")]) == ["runs"] * (1 + has_folder)
