"""The `logging` section, and the table of trackers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# Trackers for `reprise publish`, by name: each value is the path of a `Tracker` class.
TRACKERS = {
    name: f"trainer.publish.{name}_tracker.{name.capitalize()}Tracker"
    for name in ("wandb", "swanlab", "mlflow", "trackio")
}


@dataclass
class LoggingSection:
    """Log and metrics.

    Args:
        log_interval: Iterations between log lines.
        tensorboard: Write TensorBoard files into the run's folder.
        publish: Tracker to which a process beside the run sends metrics (docs/trackers.md): `wandb`, `swanlab`,
            `mlflow` or `trackio`.
    """

    log_interval: int = 1
    tensorboard: bool = True
    publish: str | None = None


def logging_problems(section: LoggingSection) -> Iterator[str]:
    """List an unknown tracker."""
    if section.publish is not None and section.publish not in TRACKERS:
        yield f"logging.publish={section.publish}: must be one of {', '.join(TRACKERS)}"
