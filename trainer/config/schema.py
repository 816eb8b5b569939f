"""The configuration schema, filled by Hydra: a module per section, composed here.

`checks.py` finds the reasons why a configuration cannot run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_type_hints

from models.config import ModelConfig
from trainer.config.checkpoint import CheckpointSection
from trainer.config.frozen import frozen_names
from trainer.config.logging import LoggingSection
from trainer.config.optimizer import OptimizerSection
from trainer.config.parallel import ParallelSection
from trainer.config.run import RunSection
from trainer.config.train import TrainSection
from trainer.data.section import DataSection
from trainer.parallel.lanes import Lanes
from trainer.schedules.lr import Schedule, ScheduleSection, resolve


@dataclass
class Config:
    """A run's configuration."""

    model: ModelConfig
    data: DataSection = field(default_factory=DataSection)
    run: RunSection = field(default_factory=RunSection)
    train: TrainSection = field(default_factory=TrainSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    logging: LoggingSection = field(default_factory=LoggingSection)
    experiment: str | None = None

    @property
    def frozen(self) -> frozenset[str]:
        """Return the stored names of the frozen parameters: those in `train.freeze`, or a base."""
        return frozen_names(self.model, self.train.freeze)

    @property
    def lanes(self) -> Lanes | None:
        """Return an iteration's lanes, or None if bits may depend on the rank count."""
        train, count = self.train, self.parallel.invariant_ranks
        return Lanes(count, train.global_batch_size // train.micro_batch_size) if count else None

    @property
    def learning_rates(self) -> Schedule:
        """Return the learning-rate schedule, with all defaults filled in."""
        return resolve(self.schedule, self.train.length, self.optimizer.lr)


@cache
def key_types() -> dict[str, tuple[Any, ...]]:
    """Return the possible types of each key, and of each section, by dotted name."""
    return dict(_types(Config))


def _types(section: Any, prefix: str = "") -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name, hint in get_type_hints(section).items():
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        yield f"{prefix}{name}", kinds
        for kind in filter(is_dataclass, kinds):
            yield from _types(kind, f"{prefix}{name}.")
