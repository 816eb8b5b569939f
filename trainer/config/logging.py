"""The `logging` section, and the tables of metric sinks and trackers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

# Metric sinks beside `metrics.jsonl`, by name: each value is the path of a `MetricSink` class.
SINKS = {
    "tensorboard": "trainer.metrics.tensorboard_sink.TensorboardSink",
}

# Trackers for `reprise publish`, by name: each value is the path of a `Tracker` class.
TRACKERS = {
    name: f"trainer.publish.{name}_tracker.{name.capitalize()}Tracker"
    for name in ("wandb", "swanlab", "mlflow", "trackio", "tensorboard")
}


@dataclass
class LoggingSection:
    """Log and metrics.

    Args:
        log_interval: Iterations between log lines.
        tensorboard: Write TensorBoard files into the run's folder.
        sinks: Additional metric sinks, by name in `trainer/config/logging.py`.
        publish: Tracker to which a process beside the run sends metrics (docs/trackers.md): `wandb`, `swanlab`,
            `mlflow`, `trackio` or `tensorboard`.
    """

    log_interval: int = 1
    tensorboard: bool = True
    sinks: list[str] = field(default_factory=list)
    publish: str | None = None


def sink_names(section: LoggingSection) -> list[str]:
    """Return the names of a run's metric sinks, beside `metrics.jsonl`."""
    return list(dict.fromkeys([*(["tensorboard"] if section.tensorboard else []), *section.sinks]))


def logging_problems(section: LoggingSection) -> Iterator[str]:
    """List unknown sinks and trackers."""
    for name in section.sinks:
        if name not in SINKS:
            yield f"logging.sinks={section.sinks}: {name} must be one of {', '.join(SINKS)}"
    if section.publish is not None and section.publish not in TRACKERS:
        yield f"logging.publish={section.publish}: must be one of {', '.join(TRACKERS)}"
