"""Opens a run's inputs other than its tensor source: token files and tokenizer.

All are read before a lock is taken, so a run without an input leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.config.schema import Config
from trainer.data.loader import BatchLoader
from trainer.data.tokenizer_files import tokenizer_files
from trainer.launch.process_group import Cluster
from trainer.run.batch_loaders import build_loaders
from trainer.run.run_data import RunData, open_data


@dataclass(frozen=True, slots=True)
class RunInputs:
    """A run's open inputs on a rank.

    Args:
        tokenizer: A checkpoint's tokenizer files by name, on rank 0. Empty without a tokenizer or without saves.
    """

    data: RunData
    train_data: BatchLoader
    valid_data: BatchLoader | None
    tokenizer: Mapping[str, bytes]


def open_inputs(config: Config, cluster: Cluster, *, is_evaluation: bool = False) -> RunInputs:
    """Open a run's inputs, the same on all ranks. Collective.

    Args:
        is_evaluation: See `open_data`.

    Raises:
        TrainerError: The data does not match the model, or a tokenizer cannot be read. Every rank raises.
    """
    data = open_data(config, cluster, is_evaluation=is_evaluation)
    train, valid = build_loaders(config, cluster, config.parallel.topology(cluster.world_size), data)
    with cluster.channel.agreed("tokenizer"):  # read once for all checkpoints
        tokenizer = tokenizer_of(config) if cluster.rank == 0 and config.checkpoint.folder is not None else {}
    return RunInputs(data, train, valid, tokenizer)


def tokenizer_of(config: Config) -> dict[str, bytes]:
    """Return a run's tokenizer files by name. Empty if it has no tokenizer.

    Raises:
        DataError: The tokenizer cannot be read.
    """
    model = config.model
    return tokenizer_files(
        config.data,
        rows=model.vocab_size,
        bos=model.bos_token_id,
        eos=model.eos_token_id,
        positions=model.max_position_embeddings,
    )
