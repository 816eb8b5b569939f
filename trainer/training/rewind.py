"""What a run does about a spike: a warning, an end, or a way back to the checkpoint before it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from reprise.errors import NonFiniteError, TrainerError
from reprise.json_file import integer
from reprise.reading import open_checkpoint
from trainer.config.schema import Config
from trainer.config.train import OnSpike
from trainer.data.position_map import SKIPPED, PositionMap
from trainer.launch.control import RunControl
from trainer.metrics.jsonl_file import newest_side_file
from trainer.metrics.jsonl_sink import METRICS
from trainer.metrics.spikes import Spike, SpikeWatch
from trainer.run.build import Run

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rewind:
    """The way back from a spike.

    Args:
        iteration: of the checkpoint to go on from.
        gap: the positions to pass over, the end excluded.
        rewound: those of all rewinds of the run, this one the last.
        control: of the run, whose time limit goes on.
    """

    iteration: int
    spike: Spike
    gap: tuple[int, int]
    rewound: tuple[tuple[int, int], ...]
    control: RunControl

    def config(self, config: Config) -> Config:
        """Return the configuration of the start that makes the rewind."""
        source = replace(
            config.checkpoint,
            load="auto",
            ckpt_step=self.iteration,
            finetune=False,
            no_load_optim=False,
            resize=False,
            partial=[],
        )
        skips = [*config.train.skip_samples, f"{self.gap[0]}-{self.gap[1]}"]
        return replace(config, checkpoint=source, train=replace(config.train, skip_samples=skips))

    def begun(self, run: Run) -> Run:
        """Return the run that has gone back, with what it keeps; log the rewind."""
        for watch in run.spikes:
            watch.rewound = list(self.rewound)
        for log in run.logs:
            abandoned = newest_side_file(Path(run.config.run.dir) / METRICS)
            members = {"from": self.spike.iteration, "skipped": list(self.gap), "abandoned": abandoned}
            text = (
                f"rewound from iteration {self.spike.iteration} to {self.iteration} because of {self.spike}: the "
                f"samples {self.gap[0]}-{self.gap[1]} are passed over, {abandoned} has the lines given up"
            )
            log.note(self.iteration, "rewind", members, text)
        return replace(run, control=self.control)


def react(run: Run, watch: SpikeWatch, spike: Spike) -> Rewind | None:
    """Log a spike of the watch, and return the rewind to make, if any. A call of all ranks, with no save under way.

    Raises:
        TrainerError: on every rank, if the spike ends the run; nothing of its iteration is saved.
    """
    settings = run.config.train
    members = {"figure": spike.figure, "value": spike.value, "limit": spike.limit}
    for log in run.logs:
        log.note(spike.iteration, "spike", members, f"a spike: {spike}")
    if settings.on_spike is OnSpike.warn:
        return None
    key = f"spike/{run.cluster.nonce}/{spike.iteration}"
    iteration, count = run.cluster.channel.from_first(key, lambda: _newest_before(run, spike.iteration))
    positions = PositionMap.from_record(run.description.get(SKIPPED, []))
    gap = positions.end(count), positions.end(run.state.progress.consumed_samples)
    rewound = (*watch.rewound, gap)
    if settings.on_spike is OnSpike.rewind and iteration >= 0 and len(rewound) <= settings.max_rewinds:
        return Rewind(iteration, spike, gap, rewound, run.control)
    raise _stopped(run, spike, iteration, rewound)


def _newest_before(run: Run, iteration: int) -> tuple[int, int]:
    """Return the newest checkpoint that opens before an iteration, and its consumed samples; -1 and 0 without any."""
    return max(_saved_before(run, iteration), default=(-1, 0))


def _saved_before(run: Run, iteration: int) -> Iterator[tuple[int, int]]:
    for folder in run.saves.folders:
        for saved in reversed([saved for saved in folder.committed() if saved < iteration]):
            try:
                state = open_checkpoint(folder.iteration(saved), folder.files, may_lack=True).state
                yield saved, integer(state["consumed_samples"])
                break
            except (TrainerError, LookupError, ValueError) as error:
                _log.warning("%s is no place to go back to: %s", folder.iteration(saved), error)


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
        fix=f"Nothing of this iteration was saved. To go on from iteration {max(iteration, 0)} without the samples "
        f"that led to it, add the range {gap} to train.skip_samples; or lower optimizer.lr.",
    )
