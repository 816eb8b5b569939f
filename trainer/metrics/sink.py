"""The interface for a metric sink, such as a file or a service."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from reprise.storage import Json


class MetricSink(ABC):
    """A metric output. Only rank 0 has sinks; it calls them from the training thread.

    An exception never ends the run. If `start` raises, the sink is not called again; otherwise it is, because the
    output may recover.

    Import the sink's library in `start` or later, so that only runs with this sink need it.

    Attributes:
        name: The sink's name in messages.
    """

    name: str

    def start(self, folder: Path, iteration: int) -> None:  # noqa: B027
        """Open the output of the run in `folder`, and drop earlier launches' records after `iteration`."""

    @abstractmethod
    def write(self, record: Json) -> None:
        """Write a record for `metrics.jsonl`, whose figures `figures_of` names. Training waits for it."""

    @abstractmethod
    def close(self) -> None:
        """Write pending records, and close the output."""
