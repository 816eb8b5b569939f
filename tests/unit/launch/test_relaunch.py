"""The names of a launch, and which of them a restart has."""

from __future__ import annotations

from torch.distributed import HashStore

from trainer.launch.relaunch import Launch, identify

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
SLURM = {"SLURM_JOB_ID": "71"}


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
