"""The interface for a metric sink, such as a file or a service."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from reprise.storage import Json


@dataclass(frozen=True, slots=True)
class RunPosition:
    """A run's position when its log opens, at the start or after a resume.

    Args:
        folder: The run's folder.
        iteration: The last iteration before. Lines for later iterations are abandoned.
        owes_evaluation: Whether the evaluation at `iteration` is still due or must be repeated.
    """

    folder: Path
    iteration: int
    owes_evaluation: bool = False


class MetricSink(ABC):
    """A metric output. Only rank 0 has sinks; it calls them from the training thread, except for `sync`.

    An exception never ends the run. If `start` raises, the sink is not called again; otherwise it is, because the
    output may recover.

    Import the sink's library in `start` or later, so that only runs with this sink need it.
    """

    def start(self, position: RunPosition) -> None:  # noqa: B027
        """Open the output, and drop earlier launches' records for iterations after the position."""

    @abstractmethod
    def write(self, record: Json) -> None:
        """Write a record for `metrics.jsonl`, whose figures `figures_of` names. Training waits for it."""

    def sync(self) -> None:  # noqa: B027
        """Make all records so far durable, because no checkpoint may be newer than its metrics.

        Saves call this from another thread, while training may write more records.
        """

    @abstractmethod
    def close(self) -> None:
        """Write pending records, and close the output."""
