"""Identifies a launch, so a restart by its launcher is recognized: options about a run's start act once per launch."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch's identity.

    Args:
        names: Its names, which stay the same when its launcher restarts it. Empty without such a launcher.
        earlier: The names under which this launch may have run before.
    """

    names: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()


def identify(variables: Mapping[str, str], agent_store: Store | None) -> Launch:
    """Return this launch's identity from torchrun and SLURM.

    torchrun's agent keeps its store until the launch ends, so a random name in the store distinguishes this launch from
    all others, whatever their rdzv-id. Without access to the store, the rdzv-id and a restart count above zero identify
    it. A requeued SLURM job keeps its number, and SLURM counts the requeues.

    Args:
        variables: The environment variables.
        agent_store: The store of torchrun's agent, if this rank is connected to it.

    Raises:
        DistError: The agent's store is gone.
    """
    names, earlier = list[str](), list[str]()
    run = variables.get("TORCHELASTIC_RUN_ID")
    if run is not None and agent_store is not None:
        drawn = bytes(agent_store.compare_set(f"reprise/launch/{run}", "", secrets.token_hex(8))).decode()
        names.append(f"torchrun/{run}/{drawn}")
        earlier.append(names[-1])
    elif run is not None:
        names.append(f"torchrun/{run}")
        earlier += names if variables.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" else []
    job = variables.get("SLURM_JOB_ID")
    if job is not None:
        names.append(f"slurm/{variables.get('SLURM_CLUSTER_NAME', '')}/{job}")
        earlier += names[-1:] if variables.get("SLURM_RESTART_COUNT", "0") != "0" else []
    return Launch(tuple(names), tuple(earlier))
