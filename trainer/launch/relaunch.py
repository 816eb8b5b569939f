"""Recognizes a launch restarted by its launcher, to let the settings of a run's start act once per launch.

Used on rank 0, and without a shared folder on the leader of every host.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from reprise.errors import CheckpointError
from reprise.storage import CheckpointFolder, Json, exists, json_file, replace_file

RECORD = "launch.json"


@dataclass(frozen=True, slots=True)
class Launch:
    """The identity of a launch.

    Args:
        names: its names, which stay the same when its launcher restarts it; empty without such a launcher.
        earlier: those names under which this launch may have run before.
        is_restarted: whether torchrun has restarted its workers.
    """

    names: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()
    is_restarted: bool = False


def identify(variables: Mapping[str, str], agent_store: Store | None) -> Launch:
    """Return the identity of this launch from torchrun and SLURM.

    torchrun's agent keeps its store until the launch ends, so a random name in the store identifies this launch among
    all others, whatever their rdzv-id. Without access to the store, the rdzv-id and a restart count above zero identify
    it. A SLURM job keeps its number when it is requeued, and SLURM counts the requeues.

    Args:
        variables: the environment.
        agent_store: the store of torchrun's agent, if this rank is connected to it.

    Raises:
        DistError: if the agent's store is gone.
    """
    names, earlier, is_restarted = [], [], False
    run = variables.get("TORCHELASTIC_RUN_ID")
    if run is not None and agent_store is not None:
        word = secrets.token_hex(8)
        drawn = bytes(agent_store.compare_set(f"reprise/launch/{run}", "", word)).decode()
        is_restarted = drawn != word
        names.append(f"torchrun/{run}/{drawn}")
        earlier.append(names[-1])
    elif run is not None:
        names.append(f"torchrun/{run}")
        is_restarted = _count(variables, "TORCHELASTIC_RESTART_COUNT") > 0
        earlier += names if is_restarted else []
    job = variables.get("SLURM_JOB_ID")
    if job is not None:
        names.append(f"slurm/{variables.get('SLURM_CLUSTER_NAME', '')}/{job}")
        earlier += names[-1:] if _count(variables, "SLURM_RESTART_COUNT") else []
    return Launch(tuple(names), tuple(earlier), is_restarted)


def _count(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "")
    return int(text) if text.isdecimal() else 0


def has_committed(folder: CheckpointFolder, launch: Launch, local: Sequence[int] = ()) -> bool:
    """Return whether this launch has run before and committed a checkpoint beyond the iteration at which it began.

    Args:
        local: the iterations of local checkpoints.

    Raises:
        CheckpointError: if its record is malformed, since a wrong guess would move checkpoints aside.
    """
    record = _read(folder.root / RECORD) if launch.earlier else None
    if record is None or not set(launch.earlier) & set(record["launches"]):
        return False
    return any(iteration > record["began_at"] for iteration in (*folder.committed(), *local))


def note(folder: CheckpointFolder, launch: Launch, iteration: int | None) -> None:
    """Record durably the iteration at which this launch began.

    Args:
        iteration: -1 for a fresh start; None for a restart, which only adds new names.

    Raises:
        OSError: if the folder cannot be written.
        CheckpointError: as `has_committed`.
    """
    path = folder.root / RECORD
    record: Json = {"launches": list(launch.names), "began_at": iteration}
    if iteration is None:
        stored = _read(path) or {"launches": [], "began_at": -1}
        if set(launch.names) <= set(stored["launches"]):
            return
        record = {
            **stored,
            "launches": [*stored["launches"], *(n for n in launch.names if n not in stored["launches"])],
        }
    replace_file(folder.files, path, json_file.to_bytes(record))


def _read(path: Path) -> Json | None:
    if not exists(path):
        return None
    record = json_file.read(path)
    names, began_at = record.get("launches"), record.get("began_at")
    if type(began_at) is not int or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            "The record of a launch is malformed",
            where=path,
            expected="names and an iteration",
            fix="Delete it; the next start then follows checkpoint.load and checkpoint.ckpt_step.",
        )
    return record
