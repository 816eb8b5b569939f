"""The section `run`: where a run keeps what it writes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RunSection:
    """The run's name and folder.

    Args:
        name: name; the same command with it continues the run.
        dir: folder of configuration, metrics, TensorBoard files and, by default, checkpoints.
    """

    name: str = "default"
    dir: str = "runs/${run.name}"
