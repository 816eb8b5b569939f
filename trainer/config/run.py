"""The `run` section: where a run writes its files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RunSection:
    """The run's name and folder.

    Args:
        name: The run's name. The same command with the same name continues the run.
        dir: Folder for configuration, metrics, TensorBoard files and, by default, checkpoints.
    """

    name: str = "default"
    dir: str = "runs/${run.name}"
