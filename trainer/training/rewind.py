"""Reacts to a loss spike: warns, ends the run, or rewinds to the checkpoint before it."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from reprise.errors import CheckpointError, NonFiniteError, TrainerError
from reprise.loading import open_checkpoint
from reprise.ranks import StoreChannel
from reprise.storage import Json, exists, integer
from trainer.config.schema import Config
from trainer.config.train import OnSpike
from trainer.data.position_map import SKIPPED, PositionMap
from trainer.launch.control import RunControl
from trainer.launch.process_group import Cluster
from trainer.metrics.json_lines import METRICS, read_records
from trainer.metrics.jsonl_file import newest_side_file
from trainer.metrics.launch_log import LAUNCHES
from trainer.metrics.spikes import Spike, SpikeWatch
from trainer.run.build import Run
from trainer.saves.targets import Saves

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rewind:
    """A rewind from a spike.

    Args:
        iteration: The checkpoint iteration to continue from.
        gap: Positions to skip, end excluded.
        rewound: The gaps for all rewinds in the run, this rewind's last.
        saved: The lineage in the checkpoint.
        control: The run's control, whose time limit keeps running. None for a rewind from an earlier launch.
    """

    iteration: int
    spike: Spike
    gap: tuple[int, int]
    rewound: tuple[tuple[int, int], ...]
    saved: Json
    control: RunControl | None = None

    def config(self, config: Config) -> Config:
        """Return the configuration for the start that makes the rewind."""
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

    def begin(self, run: Run) -> None:
        """Tell a run about its rewind, and log the rewind unless an earlier launch has."""
        for watch in run.spikes:
            watch.rewound = list(self.rewound)
        for log in () if self.control is None else run.logs:
            abandoned = newest_side_file(Path(run.config.run.dir) / METRICS)
            members = {"from": self.spike.iteration, "skipped": list(self.gap), "abandoned": abandoned}
            text = (
                f"rewound from iteration {self.spike.iteration} to {self.iteration} because of {self.spike}: "
                f"samples {self.gap[0]}-{self.gap[1]} are skipped, {abandoned} has the abandoned lines"
            )
            log.note(self.iteration, "rewind", members, text)
            log.rewound(self.iteration, self.record())

    def record(self) -> Json:
        """Return the rewind for the launch record."""
        spike = self.spike
        figures = {"figure": spike.figure, "value": spike.value.hex(), "limit": spike.limit.hex()}
        return {"from": spike.iteration, **figures, "gap": self.gap, "rewound": self.rewound, "saved": self.saved}

    @staticmethod
    def from_record(line: Json) -> Rewind:
        """Return the rewind from a line in the launch record."""
        value, limit = float.fromhex(line["value"]), float.fromhex(line["limit"])
        spike = Spike(integer(line["from"]), str(line["figure"]), value, limit)
        rewound = tuple(PositionMap.from_record([gap]).gaps[0] for gap in line["rewound"])
        return Rewind(integer(line["iteration"]), spike, rewound[-1], rewound, line["saved"])


def unfinished_rewind(config: Config, cluster: Cluster, saves: Saves) -> Rewind | None:
    """Return the last rewind from an earlier launch, if it was killed before its next save. A collective call."""
    section = config.checkpoint
    if config.train.on_spike is not OnSpike.rewind or section.load == "none" or section.ckpt_step is not None:
        return None
    path = Path(config.run.dir) / LAUNCHES
    iteration, _, saved = newest_before(saves, cluster.channel, f"unfinished/{cluster.nonce}", None)

    def find() -> Json | None:
        if not exists(path):
            return None
        rewinds = [line for line in read_records(path) if line.get("event") == "rewind"]
        is_last = bool(rewinds) and (rewinds[-1].get("iteration"), rewinds[-1].get("saved")) == (iteration, saved)
        return rewinds[-1] if is_last else None

    line = cluster.channel.from_first(f"unfinished/{cluster.nonce}/line", find)
    if line is None:
        return None
    try:
        return Rewind.from_record(line)
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError("A record of a rewind is damaged", where=path, found=repr(error)) from error


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
    key = f"spike/{run.cluster.nonce}/{spike.iteration}"
    iteration, count, saved = newest_before(run.saves, run.cluster.channel, key, spike.iteration)
    positions = PositionMap.from_record(run.course.description.get(SKIPPED, []))
    gap = positions.end(count), positions.end(run.state.progress.consumed_samples)
    rewound = (*watch.rewound, gap)
    if settings.on_spike is OnSpike.rewind and iteration >= 0 and len(rewound) <= settings.max_rewinds:
        return Rewind(iteration, spike, gap, rewound, saved, run.control)
    raise _stopped(run, spike, iteration, rewound)


def newest_before(saves: Saves, channel: StoreChannel, key: str, iteration: int | None) -> tuple[int, int, Json]:
    """Return the newest checkpoint on all hosts, its consumed samples and lineage, or -1, 0, {} if there is none.

    A collective call.

    Args:
        iteration: The checkpoint must be older than this iteration. None accepts any.
    """
    local = [folder for folder in saves.folders if folder is not saves.shared]
    rows = channel.gather(f"{key}/local", json.dumps([n for folder in local for n in folder.committed()]).encode())

    def newest() -> tuple[int, int, Json]:
        common = set[int].intersection(*(set(json.loads(row)) for row in rows))
        shared = () if saves.shared is None else saves.shared.committed()
        candidates = [*((saves.shared, n) for n in shared), *((folder, n) for folder in local for n in common)]
        for folder, number in sorted(candidates, key=lambda candidate: candidate[1], reverse=True):
            if folder is None or (iteration is not None and number >= iteration):
                continue
            try:
                state = open_checkpoint(folder.iteration(number), folder.files, may_lack=True).state
                return number, integer(state["consumed_samples"]), state.get("run", {})
            except (TrainerError, LookupError, ValueError) as error:
                _log.warning("cannot rewind to %s: %s", folder.iteration(number), error)
        return -1, 0, {}

    number, count, saved = channel.from_first(key, newest)
    return number, count, saved


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
