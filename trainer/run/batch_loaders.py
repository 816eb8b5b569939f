"""Builds a rank's micro-batch loaders from a run's open data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from trainer.config.schema import Config
from trainer.data.batches import Samples
from trainer.data.blend import Blend
from trainer.data.loader import BatchLoader
from trainer.data.section import SampleCut
from trainer.data.token_file import TokenFile
from trainer.launch.process_group import Cluster
from trainer.parallel.topology import Topology
from trainer.run.run_data import RunData

_log = logging.getLogger(__name__)


def build_loaders(
    config: Config, cluster: Cluster, topology: Topology, data: RunData
) -> tuple[BatchLoader, BatchLoader | None]:
    """Return the loaders for this rank's training and validation data. None without evaluations.

    Raises:
        DataError: A source has no sample.
    """
    train = config.train
    dp_rank = topology.coordinate(cluster.rank).dp
    per_document = config.data.samples is SampleCut.per_document

    def samples(*sources: Sequence[TokenFile]) -> Samples:
        return Samples(
            *sources,
            seq_length=train.seq_length,
            marks=data.marks,
            per_document=per_document,
        )

    def loader(source: Samples, size: int) -> BatchLoader:
        numbers = micro_batches_of(config, topology, dp_rank, size)
        return BatchLoader(source, size, train.micro_batch_size, numbers, cluster.device)

    training = replace(
        loader(samples(*(source.files for source in data.train)), max(train.batch_sizes.sizes)),
        blend=_build_blend(data, cluster),
        position_map=train.position_map,
    )
    if not train.eval_interval:
        return training, None
    held_out, drawn = samples(data.valid), train.eval_iters * train.global_batch_size
    if cluster.rank == 0 and held_out.count < drawn:
        _log.warning(
            f"an evaluation takes {drawn} samples (train.eval_iters x train.global_batch_size), and the validation "
            f"data has {held_out.count}, which repeat in order"
        )
    return training, loader(held_out, train.global_batch_size)


def micro_batches_of(config: Config, topology: Topology, dp_rank: int, global_batch_size: int) -> list[int]:
    """Return a data-parallel rank's micro-batch numbers within an iteration, in the order it runs them.

    A smaller iteration's numbers are a prefix.
    """
    lanes = config.lanes
    if lanes is None:
        return list(range(dp_rank, global_batch_size // config.train.micro_batch_size, topology.dp))
    copies = topology.replicate if config.parallel.reduces_lanes_over_ranks(topology) else topology.dp
    return lanes.micro_batches_of(dp_rank, topology.dp, blocks=copies)


def _build_blend(data: RunData, cluster: Cluster) -> Blend:
    """Return the blend of all sources, and log each source's share."""
    blend = Blend([source.weight for source in data.train])
    if cluster.rank or len(data.train) == 1:
        return blend
    if not blend.is_exact:
        _log.warning(f"data.train: weights are rounded to parts of {blend.period}, see docs/samples.md")
    for source, share in zip(data.train, blend.shares, strict=True):
        more = f" and {len(source.files) - 1} more files" if len(source.files) > 1 else ""
        _log.info(f"source {source.fingerprint}: {float(share):.6f} of the samples, {source.files[0].path}{more}")
    return blend
