"""The section `run`: where a run keeps what it writes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RunSection:
    """The run's name and folder.

    Args:
        name: name of the run; the same command with the same name continues it.
        dir: folder of the run's configuration, metrics, TensorBoard files and, by default, checkpoints.
    """

    name: str = "default"
    dir: str = "runs/${run.name}"
