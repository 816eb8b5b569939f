"""Opens a run's inputs other than its tensor source: token files, tokenizer, and sampling prompt.

All are read before a lock is taken, so a run without an input leaves nothing behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainer.config.derived import save_folder, topology_of
from trainer.config.schema import Config
from trainer.data.loader import BatchLoader
from trainer.data.text import open_encoder, prompt_tokens
from trainer.data.tokenizer_files import tokenizer_files
from trainer.generate.during_training import NO_SAMPLES, Sampler
from trainer.launch.process_group import Cluster
from trainer.run.batch_loaders import ValidData, build_loaders
from trainer.run.run_data import RunData, open_data

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunInputs:
    """A run's open inputs on a rank.

    Args:
        tokenizer: A checkpoint's tokenizer files by name, on rank 0. Empty without a tokenizer or without saves.
    """

    data: RunData
    train_data: BatchLoader
    valid_data: ValidData
    sampler: Sampler
    tokenizer: Mapping[str, bytes]


def open_inputs(config: Config, cluster: Cluster, *, is_evaluation: bool = False) -> RunInputs:
    """Open a run's inputs, the same on all ranks. Collective.

    Args:
        is_evaluation: See `open_data`.

    Raises:
        TrainerError: The data does not match the model, or a tokenizer cannot be read. Every rank raises.
    """
    data = open_data(config, cluster, is_evaluation=is_evaluation)
    train, valid = build_loaders(config, cluster, topology_of(config, cluster.world_size), data)
    samples = config.train.sample_interval > 0
    if samples and config.parallel.pipeline_model_parallel_size > 1:
        samples = False
        if cluster.rank == 0:
            _log.warning("train.sample_interval: a pipeline samples no texts; use `reprise generate`")
    sampler = _build_sampler(config, cluster) if samples else NO_SAMPLES
    return RunInputs(data, train, valid, sampler, _read_tokenizer(config, cluster))


def _build_sampler(config: Config, cluster: Cluster) -> Sampler:
    """Open the tokenizer on rank 0, and broadcast the prompt tokens."""
    train = config.train
    decode: Callable[[Sequence[int]], str] = str

    def tokens() -> list[int]:
        nonlocal decode
        encoder = open_encoder(config.data.tokenizer)
        decode = encoder.decode
        return list(prompt_tokens(encoder, train.sample_prompt, config.model.vocab_size))

    prompt = cluster.channel.from_first("sampler", tokens)
    return Sampler(
        interval=train.sample_interval,
        prompt=prompt,
        max_new_tokens=train.sample_tokens,
        seq_length=train.seq_length,
        rows=train.micro_batch_size if train.compile else 1,
        seed=train.seed,
        decode=decode,
    )


def _read_tokenizer(config: Config, cluster: Cluster) -> dict[str, bytes]:
    """Read the tokenizer on rank 0, once for all checkpoints."""
    with cluster.channel.agreed("tokenizer"):
        return tokenizer_of(config) if cluster.rank == 0 and save_folder(config.checkpoint) is not None else {}


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
