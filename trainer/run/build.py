"""Builds a run from its configuration."""

from __future__ import annotations

import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from models import families
from models.network import Model
from reprise.loading import Restorer
from reprise.ranks import single_rank_channel
from reprise.storage import Json
from trainer.config import saved
from trainer.config.schema import Config
from trainer.config.train import OnSpike
from trainer.data.loader import BatchLoader
from trainer.launch.control import RunControl
from trainer.launch.device import device_name
from trainer.launch.process_group import Cluster, thread_count
from trainer.launch.signals import SignalHandler
from trainer.launch.start_times import StartTimes
from trainer.metrics.profile import Profiler
from trainer.metrics.publish_sink import PublishSink
from trainer.metrics.run_log import RunLog, Slowdown, peak_flops
from trainer.metrics.sink import MetricSink
from trainer.metrics.spikes import SpikeWatch
from trainer.metrics.tensorboard_sink import TensorboardSink
from trainer.parallel.context import ParallelContext
from trainer.parallel.mesh import build_mesh, stage_grid
from trainer.parallel.topology import Topology
from trainer.record import run_record
from trainer.record.environment import environment_record, joint_environment
from trainer.record.versions import source_commit, versions
from trainer.run.inputs import RunInputs
from trainer.run.parallelize import build_context, build_models
from trainer.run.run_data import RunData, open_data
from trainer.run.state import TrainerState, build_part, checkpoint_specs
from trainer.saves.targets import Saves
from trainer.schedules.batch_size import BatchSchedule
from trainer.schedules.lr import Schedule
from trainer.schedules.progress import Progress

if TYPE_CHECKING:
    from reprise.stores import Mirror


@dataclass(slots=True)
class Run:
    """A run: its state, data, outputs, and control. A start sets its source's schedule and data.

    Args:
        schedule: The learning-rate schedule.
        train_data, valid_data: The data loaders. Without evaluations, there is no validation data.
        description: The run's record in its checkpoints.
        control: The requests to this rank. By default nobody stops the run.
        saved_config: The `run_config.json` for its checkpoints. Only rank 0 knows the commit.
        tokenizer: A checkpoint's tokenizer files by name, on rank 0. Empty without a tokenizer or without saves.
        start_times: This start's times. By default they count from the building.
        spikes: The spike detector. Empty if the run does not look for spikes.
        slowdown: The iteration times with and without saves under way.
        logs: Rank 0's log once it is open.
        mirrors: The process that uploads checkpoints, on rank 0 with a mirror.
    """

    config: Config
    cluster: Cluster
    topology: Topology
    state: TrainerState
    schedule: Schedule
    train_data: BatchLoader
    description: Json
    saved_config: Json
    context: ParallelContext
    batch_schedule: BatchSchedule
    valid_data: BatchLoader | None
    saves: Saves
    restorer: Restorer
    control: RunControl
    tokenizer: Mapping[str, bytes]
    profiler: Profiler
    start_times: StartTimes = field(default_factory=StartTimes)
    spikes: tuple[SpikeWatch, ...] = ()
    slowdown: Slowdown = field(default_factory=Slowdown)
    logs: tuple[RunLog, ...] = ()
    mirrors: tuple[Mirror, ...] = ()

    @property
    def train_iters(self) -> int:
        """Return the run's last iteration, given the samples consumed so far."""
        return self.last_iteration(self.state.progress)

    def last_iteration(self, progress: Progress) -> int:
        """Return the run's last iteration, counted from a position."""
        train = self.config.train
        if train.train_samples is None:
            return train.train_iters
        return progress.iteration + self.batch_schedule.iterations(progress.consumed_samples, train.train_samples)

    def share_of(self, size: int) -> float:
        """Return the mean micro-batch count per data-parallel rank in an iteration with `size` samples."""
        return size / (self.config.train.micro_batch_size * self.topology.dp)


def build(
    config: Config,
    cluster: Cluster,
    *,
    inputs: RunInputs,
    saves: Saves,
    environment_keys: Collection[str] = (),
) -> Run:
    """Build a run. Collective.

    Args:
        inputs: The opened inputs.
        saves: The save targets.
        environment_keys: Dotted keys whose values come from environment variables. Checkpoints leave them out.
    """
    topology = config.parallel.topology(cluster.world_size)
    mesh = build_mesh(topology, cluster.device.type)
    schedule, description = _described(config, cluster, topology, inputs.data)
    stages = build_models(config, cluster, topology=topology, mesh=mesh)
    state = build_state(config, stages, topology, topology.coordinate(cluster.rank).pp)
    document = run_config(config, with_commit=cluster.rank == 0 and config.checkpoint.folder is not None)
    return Run(
        config=config,
        cluster=cluster,
        topology=topology,
        state=state,
        schedule=schedule,
        train_data=inputs.train_data,
        description=description,
        saved_config=saved.without_keys(document, environment_keys),
        context=build_context(config, state, topology=topology, mesh=mesh, cluster=cluster),
        batch_schedule=config.train.batch_sizes,
        valid_data=inputs.valid_data,
        saves=saves,
        restorer=Restorer(cluster.channel, nonce=cluster.nonce),
        control=RunControl(config, SignalHandler(lambda _: None), rank=cluster.rank),
        tokenizer=inputs.tokenizer,
        profiler=Profiler(Path(config.run.dir), config.train.profile_steps, rank=cluster.rank),
        spikes=()
        if config.train.on_spike is OnSpike.off
        else (SpikeWatch(config.train.spike_factor, config.train.spike_window),),
    )


def describe_alone(config: Config) -> tuple[Schedule, Json]:
    """Return the schedule and record for a single-process run on a CPU, without building it.

    Raises:
        TrainerError: The data does not match the model.
    """
    device, threads = torch.device("cpu"), thread_count(config.train.threads)
    cluster = Cluster(0, 1, device, threads, single_rank_channel(), nonce="")
    return _described(config, cluster, config.parallel.topology(1), open_data(config, cluster))


def _described(config: Config, cluster: Cluster, topology: Topology, data: RunData) -> tuple[Schedule, Json]:
    """Return a run's schedule and record. Collective."""
    schedule = config.learning_rates
    environment = joint_environment(environment_record(config, cluster.device, cluster.threads), cluster)
    return schedule, run_record.describe(
        config, schedule=schedule, topology=topology, data=data.record(config), environment=environment
    )


def build_state(config: Config, stages: Sequence[Model], topology: Topology, pp: int) -> TrainerState:
    """Return the state of a pipeline rank's stages."""
    grid, last, averages = stage_grid(topology, pp), topology.pp - 1, config.train.ema_decay > 0
    ends = {0: last, last: -last}  # of the pipeline
    specs = tuple(checkpoint_specs(config.model, config.optimizer, config.frozen, averages=averages))
    return TrainerState(
        config.model,
        [build_part(config, stage, grid, specs) for stage in stages],
        grid,
        specs,
        averages=averages,
        other_end=ends.get(pp, 0) * topology.dp * topology.tp,
    )


def run_config(config: Config, *, with_commit: bool) -> Json:
    """Return the `run_config.json` for a run's checkpoints.

    Args:
        with_commit: Ask git for the commit, which starts another process.
    """
    document = {"format": saved.FORMAT, "config": saved.saved_config(config), "versions": versions()}
    return {**document, "commit": source_commit() if with_commit else None}


def launch_record(run: Run) -> Json:
    """Describe a launch: its topology, settings, environment and software, and rank 0's host."""
    settings = {name: run.saved_config[name] for name in ("config", "versions", "commit")}
    return {
        "host": platform.node(),
        **{name: run.description[name] for name in ("topology", "environment")},
        **settings,
    }


def build_log(run: Run) -> RunLog:
    """Return a filled run's log, on rank 0."""
    config, cluster = run.config, run.cluster
    peak = peak_flops(device_name(cluster.device))
    flops = families.flops_per_token(config.model, config.train.seq_length)
    sinks: list[MetricSink] = [] if config.logging.publish is None else [PublishSink(config.logging.publish)]
    sinks += [TensorboardSink()] if config.logging.tensorboard else []
    return RunLog(
        Path(config.run.dir),
        train_iters=run.train_iters,
        sinks=sinks,
        mfu_scale=None if peak is None else flops / (peak * cluster.world_size),
    )
