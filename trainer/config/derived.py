"""Values derived from a configuration: topology, batch sizes, run length, lanes and save folder."""

from __future__ import annotations

from pathlib import Path

from trainer.config.checkpoint import CheckpointSection
from trainer.config.schema import Config
from trainer.config.train import TrainSection
from trainer.parallel.lanes import Lanes
from trainer.parallel.topology import Topology
from trainer.schedules.batch_size import BatchSchedule, parse_batch_schedule
from trainer.schedules.lr import RunLength


def save_folder(section: CheckpointSection) -> Path | None:
    """Return the folder for a run's saves, the shared folder if there are two. None if it saves nothing."""
    folder = section.save if section.save is not None else section.local.dir
    return None if folder is None else Path(folder)


def topology_of(config: Config, world_size: int) -> Topology:
    """Return the topology for `world_size` ranks, a multiple of the model-parallel sizes."""
    parallel = config.parallel
    pp, tp = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    dp = world_size // (pp * tp)
    vpp, replicate = parallel.num_virtual_stages_per_pipeline_rank, parallel.replicate
    return Topology(pp, dp, tp, vpp=vpp, sp=parallel.sequence_parallel, replicate=replicate)


def batch_schedule_of(train: TrainSection) -> BatchSchedule:
    """Return a run's global batch sizes."""
    if train.batch_schedule is None:
        return BatchSchedule(((0, train.global_batch_size),))
    return parse_batch_schedule(train.batch_schedule)


def length_of(train: TrainSection) -> RunLength:
    """Return a run's length, counted from its first sample."""
    sizes = batch_schedule_of(train)
    if train.train_samples is None:
        return RunLength(train.train_iters, sizes.consumed_after(train.train_iters), False, sizes.last)
    return RunLength(sizes.iterations(0, train.train_samples), train.train_samples, True, sizes.last)


def lanes_of(config: Config) -> Lanes | None:
    """Return an iteration's lanes, or None if bits may depend on the rank count."""
    train, count = config.train, config.parallel.invariant_ranks
    return Lanes(count, train.global_batch_size // train.micro_batch_size) if count else None


def reduces_lanes_over_ranks(config: Config, topology: Topology) -> bool:
    """Return whether every lane is reduced over ranks, as with ZeRO stages 2 and 3 outside a pipeline."""
    return config.parallel.zero_stage >= 2 and topology.dp > 1 and topology.pp == 1


def share_of(config: Config, world_size: int, size: int) -> float:
    """Return the mean micro-batch count per data-parallel rank in an iteration with `size` samples."""
    return size / (config.train.micro_batch_size * topology_of(config, world_size).dp)


def micro_batches_of(config: Config, topology: Topology, dp_rank: int, global_batch_size: int) -> list[int]:
    """Return a data-parallel rank's micro-batch numbers within an iteration, in the order it runs them.

    A smaller iteration's numbers are a prefix.
    """
    lanes = lanes_of(config)
    if lanes is None:
        return list(range(dp_rank, global_batch_size // config.train.micro_batch_size, topology.dp))
    copies = topology.replicate if reduces_lanes_over_ranks(config, topology) else topology.dp
    return lanes.micro_batches_of(dp_rank, topology.dp, blocks=copies)
