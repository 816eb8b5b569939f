"""What a launch goes by, and when a start is a restart of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed import HashStore

from reprise.errors import CheckpointError
from reprise.storage import CheckpointFolder, Files, iteration_name
from tests.messages import refused
from trainer.launch.relaunch import RECORD, Launch, has_committed, identify, note

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
SLURM = {"SLURM_JOB_ID": "71"}


def folder(root: Path, *iterations: int) -> CheckpointFolder:
    for iteration in iterations:
        (root / iteration_name(iteration)).mkdir(parents=True, exist_ok=True)
    return CheckpointFolder(root, Files())


def is_restart(first: Launch, then: Launch) -> bool:
    return bool(set(then.earlier) & set(first.names))


def test_a_store_that_outlives_its_ranks_identifies_the_launch() -> None:
    """Workers that are started again as a host comes or goes count no restart; another launch may have the same id."""
    store = HashStore()
    first, again, other = identify(TORCHRUN, store), identify(TORCHRUN, store), identify(TORCHRUN, HashStore())
    assert is_restart(first, again)
    assert not is_restart(first, other)
    counted = {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}
    assert not is_restart(first, identify(counted, HashStore()))


def test_a_launch_knows_whether_torchrun_has_restarted_it() -> None:
    store = HashStore()
    found = [identify(TORCHRUN, store), identify(TORCHRUN, store), identify(TORCHRUN, None)]
    found += [identify({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}, None), identify({}, None)]
    assert [launch.is_restarted for launch in found] == [False, True, False, True, False]
    assert found[-1] == Launch()  # a plain start restarts nothing


def test_without_that_store_the_count_of_restarts_decides() -> None:
    first = identify(TORCHRUN, None)
    assert not is_restart(first, identify(TORCHRUN, None))
    counted = {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}
    assert is_restart(first, identify(counted, None))
    assert not is_restart(first, identify({**counted, "TORCHELASTIC_RUN_ID": "other"}, None))


def test_a_requeued_job_is_one_launch_a_second_command_another() -> None:
    first = identify({**SLURM, **TORCHRUN}, HashStore())
    requeued = {**SLURM, "SLURM_RESTART_COUNT": "1", **TORCHRUN}
    assert is_restart(first, identify(requeued, HashStore()))
    assert not is_restart(first, identify({**SLURM, **TORCHRUN}, HashStore()))
    assert not is_restart(first, identify({**requeued, "SLURM_JOB_ID": "72"}, HashStore()))
    assert not is_restart(first, identify({**requeued, "SLURM_CLUSTER_NAME": "two"}, HashStore()))


def test_a_launch_has_committed_only_beyond_its_beginning(tmp_path: Path) -> None:
    launch, stranger = Launch(("a", "b"), ("a",)), Launch(("c",), ("c",))
    found = folder(tmp_path, 4)
    assert not has_committed(found, launch)
    note(found, launch, 4)
    assert not has_committed(found, launch)
    folder(tmp_path, 6)
    assert has_committed(found, launch)
    assert not has_committed(found, stranger)
    assert not has_committed(found, Launch(("a",)))


def test_a_restart_keeps_the_beginning_and_adds_its_names(tmp_path: Path) -> None:
    """A job that is requeued, and whose ranks torchrun then starts again before they have saved anything more."""
    found = folder(tmp_path, 6)
    note(found, Launch(("torchrun/1", "slurm/7")), -1)
    note(found, Launch(("torchrun/2", "slurm/7"), ("slurm/7",)), None)
    assert has_committed(found, Launch(("torchrun/2",), ("torchrun/2",)))
    assert json.loads((tmp_path / RECORD).read_text()) == {
        "launches": ["torchrun/1", "slurm/7", "torchrun/2"],
        "began_at": -1,
    }


@pytest.mark.parametrize("text", ["{", "{}", '{"launches": [1], "began_at": 1}', '{"launches": [], "began_at": true}'])
def test_a_malformed_record_is_refused_by_a_restart_alone(tmp_path: Path, text: str) -> None:
    found = folder(tmp_path, 6)
    (tmp_path / RECORD).write_text(text)
    assert not has_committed(found, Launch(("a",)))
    with refused(CheckpointError, RECORD):
        has_committed(found, Launch(("a",), ("a",)))
