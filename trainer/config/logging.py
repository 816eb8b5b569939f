"""The section `logging` with the ranges of its keys, and the tables of outputs of metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

# The outputs of metrics beside `metrics.jsonl`, by name: the class of each, a `MetricSink`.
SINKS = {
    "tensorboard": "trainer.metrics.tensorboard_sink.TensorboardSink",
}

# The trackers of `reprise publish`, by name: the class of each, a `Tracker`.
TRACKERS = {
    name: f"trainer.publish.{name}_tracker.{name.capitalize()}Tracker"
    for name in ("wandb", "swanlab", "mlflow", "trackio", "tensorboard")
}


@dataclass
class LoggingSection:
    """The log and the metrics.

    Args:
        log_interval: iterations between lines of the log.
        tensorboard: write TensorBoard files into the run's folder.
        sinks: further outputs of metrics, by name in `trainer/config/logging.py`.
        publish: tracker to which a process beside the run sends metrics (docs/trackers.md): `wandb`, `swanlab`,
            `mlflow`, `trackio` or `tensorboard`.
    """

    log_interval: int = 1
    tensorboard: bool = True
    sinks: list[str] = field(default_factory=list)
    publish: str | None = None


def sink_names(section: LoggingSection) -> list[str]:
    """Return the names of a run's outputs of metrics, beside `metrics.jsonl`."""
    return list(dict.fromkeys([*(["tensorboard"] if section.tensorboard else []), *section.sinks]))


def logging_problems(section: LoggingSection) -> list[str]:
    """Return every key of the section outside its range."""
    problems = []
    if section.log_interval < 1:
        problems.append(f"logging.log_interval={section.log_interval}: must be at least 1")
    problems += [
        f"logging.sinks={section.sinks}: {name} is none of {', '.join(SINKS)}"
        for name in section.sinks
        if name not in SINKS
    ]
    if section.publish is not None and section.publish not in TRACKERS:
        problems.append(f"logging.publish={section.publish}: must be one of {', '.join(TRACKERS)}")
    return problems
