"""Reacts to a loss spike: warns, ends the run, or rewinds to the checkpoint before it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from reprise.errors import NonFiniteError, TrainerError
from reprise.loading import open_checkpoint
from reprise.storage import FILE_SYSTEM, integer, iteration_of
from trainer.config.schema import Config
from trainer.config.train import OnSpike
from trainer.data.position_map import SKIPPED, PositionMap
from trainer.launch.process_group import Cluster
from trainer.metrics.json_lines import METRICS
from trainer.metrics.jsonl_file import newest_side_file
from trainer.metrics.spikes import Spike, SpikeWatch
from trainer.run.build import Run
from trainer.saves.targets import Saves

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rewind:
    """A rewind from a spike.

    Args:
        iteration: The checkpoint iteration to continue from.
        rewound: The positions to skip for all rewinds in the run, ends excluded, this rewind's last.
    """

    iteration: int
    spike: Spike
    rewound: tuple[tuple[int, int], ...]

    def config(self, config: Config) -> Config:
        """Return the configuration for the start that makes the rewind."""
        section = config.checkpoint
        base = section.load if section.finetune and section.base is None else section.base  # beneath adapters
        source = replace(section, load="auto", ckpt_step=self.iteration, finetune=False, no_load_optim=False, base=base)
        skips = [*config.train.skip_samples, "{}-{}".format(*self.rewound[-1])]
        return replace(config, checkpoint=source, train=replace(config.train, skip_samples=skips))

    def begin(self, run: Run) -> None:
        """Tell a run about its rewind, and log it."""
        for watch in run.spikes:
            watch.rewound = list(self.rewound)
        path, (first, end) = Path(run.config.run.dir) / METRICS, self.rewound[-1]
        for log in run.logs:
            abandoned = newest_side_file(path)
            members = {"from": self.spike.iteration, "skipped": [first, end], "abandoned": abandoned}
            text = (
                f"rewound from iteration {self.spike.iteration} to {self.iteration} because of {self.spike}: "
                f"samples {first}-{end} are skipped, {abandoned} has the abandoned lines"
            )
            log.note(self.iteration, "rewind", members, text)


def react(run: Run, watch: SpikeWatch, spike: Spike) -> Rewind | None:
    """Log a spike, and return the rewind to make, if any. A collective call.

    All saves have finished, unless spikes only warn.

    Raises:
        TrainerError: The spike ends the run, on every rank. Nothing from its iteration is saved.
    """
    settings = run.config.train
    members = {"figure": spike.figure, "value": spike.value, "limit": spike.limit}
    for log in run.logs:
        log.note(spike.iteration, "spike", members, f"a spike: {spike}")
    if settings.on_spike is OnSpike.warn:
        return None
    iteration, count = newest_before(run.saves, run.cluster, spike.iteration)
    positions = PositionMap.from_record(run.description.get(SKIPPED, []))
    gap = positions.end(count), positions.end(run.state.progress.consumed_samples)
    rewound = (*watch.rewound, gap)
    if settings.on_spike is OnSpike.rewind and iteration >= 0 and len(rewound) <= settings.max_rewinds:
        return Rewind(iteration, spike, rewound)
    raise _stopped(run, spike, iteration, rewound)


def newest_before(saves: Saves, cluster: Cluster, iteration: int) -> tuple[int, int]:
    """Return the newest checkpoint on all hosts before an iteration, and its consumed samples, or -1, 0 without one.

    A collective call.
    """
    if saves.host_folders is not None:
        saves.host_folders.survey()

    def newest() -> tuple[int, int]:
        paths = [] if saves.host_folders is None else saves.host_folders.paths()
        if saves.shared is not None:
            paths += map(saves.shared.iteration, saves.shared.committed())
        for path in sorted(paths, key=lambda path: iteration_of(path) or 0, reverse=True):
            number = iteration_of(path)
            if number is None or number >= iteration:
                continue
            try:
                state = open_checkpoint(path, FILE_SYSTEM, may_lack=True).state
                return number, integer(state["consumed_samples"])
            except (TrainerError, LookupError, ValueError) as error:
                _log.warning("cannot rewind to %s: %s", path, error)
        return -1, 0

    number, count = cluster.channel.from_first(f"spike/{cluster.nonce}/{iteration}", newest)
    return number, count


def _stopped(run: Run, spike: Spike, iteration: int, rewound: tuple[tuple[int, int], ...]) -> TrainerError:
    settings = run.config.train
    gap, *earlier = [f"{first}-{end}" for first, end in reversed(rewound)]
    expected = None
    if settings.on_spike is OnSpike.rewind:
        passed = f", after {', '.join(reversed(earlier))}" if earlier else ""
        expected = f"a checkpoint before it, and at most train.max_rewinds={settings.max_rewinds} rewinds{passed}"
    return NonFiniteError(
        "The loss or the gradient norm has a spike",
        where=f"iteration {spike.iteration}",
        expected=expected,
        found=spike,
        fix=f"Nothing from this iteration was saved. To continue from iteration {max(iteration, 0)} without the "
        f"samples that led to it, add the range {gap} to train.skip_samples; or lower optimizer.lr.",
    )
