"""Builds all that a run needs from its configuration. Who calls it when is the loop's business."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

import models
from trainer import record
from trainer.axes import Axes
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.json_file import Json
from trainer.checkpoint.policy import SavePolicy
from trainer.checkpoint.retention import Retention
from trainer.config import Config, topology_of
from trainer.data.batches import Samples
from trainer.data.corpus import Corpus, default_cache, prepare
from trainer.data.fingerprint import check_tokens, fingerprint, scan
from trainer.data.text import open_encoder, prompt_tokens
from trainer.data.token_file import open_token_files
from trainer.data.tokenizer_files import tokenizer_files
from trainer.errors import DataError, TrainerError
from trainer.feed import Feed
from trainer.launch import Cluster, thread_count
from trainer.metrics import RunLog, peak_flops
from trainer.optim import AdamSettings
from trainer.parallel.mesh import build_mesh
from trainer.parts import build_axes, build_grid, build_models
from trainer.requests import RequestRules, Requests
from trainer.sample import Sampler
from trainer.schedule import Schedule, resolve
from trainer.signals import SignalWatch
from trainer.state import TrainerState, build_part
from trainer.topology import Topology

_DATA_TIMEOUT_S = 24 * 3600.0

# The fingerprints of the training data and of the validation data; None where nothing is evaluated.
Digests: TypeAlias = tuple[str, str | None]


@dataclass(slots=True)
class Run:
    """A run that is built: its state, what it reads, writes and shows, and who may ask something of it.

    `log` is None on ranks other than 0. `tokenizer` is the files, by name, that each checkpoint gets beside the model:
    rank 0's, and none where the run does not know its tokenizer or saves nothing.
    """

    config: Config
    cluster: Cluster
    state: TrainerState
    schedule: Schedule
    axes: Axes
    train: Feed
    valid: Feed | None
    sampler: Sampler | None
    checkpointer: Checkpointer
    log: RunLog | None
    requests: Requests
    description: Json
    tokenizer: Mapping[str, bytes]


def build(config: Config, cluster: Cluster, watch: SignalWatch | None = None) -> Run:
    """Build a run. A call of all ranks.

    Args:
        watch: what hears signals; None for nothing.

    Raises:
        TrainerError: if the data does not suit, or another job writes to the run's folder.
    """
    topology = topology_of(config, cluster.world_size)
    mesh = build_mesh(topology, cluster.device.type) if cluster.world_size > 1 else None
    train, valid, digests = _build_feeds(config, cluster, topology)
    schedule = resolve(config.schedule, config.train.train_iters, config.optimizer.lr)
    adam = _adam(config, schedule)
    stages = build_models(config, cluster.device, topology=topology, mesh=mesh)
    grid = build_grid(topology, mesh)
    file_bytes = config.checkpoint.file_bytes
    parts = [build_part(config.model, model, adam, grid=grid, file_bytes=file_bytes) for model in stages]
    state = TrainerState(config.model, parts, grid)
    environment = _environment(config, cluster.device, cluster.threads)
    description = record.describe(
        config,
        schedule=schedule,
        topology=topology,
        fingerprint=digests[0],
        environment=environment,
        valid_fingerprint=digests[1],
    )
    return Run(
        config=config,
        cluster=cluster,
        state=state,
        schedule=schedule,
        axes=build_axes(config, state, topology=topology, mesh=mesh, cluster=cluster),
        train=train,
        valid=valid,
        sampler=_build_sampler(config, cluster) if config.train.sample_interval else None,
        checkpointer=_build_checkpointer(config, cluster),
        log=_build_log(config, cluster) if cluster.rank == 0 else None,
        requests=_build_requests(config, cluster, watch),
        description=description,
        tokenizer=_read_tokenizer(config, cluster),
    )


def describe_alone(config: Config) -> tuple[Schedule, Json]:
    """Return the schedule of a run of one process on a CPU, and what it would write down of itself; builds nothing.

    Raises:
        TrainerError: if the data does not suit.
    """
    cache = Path(config.data.cache) if config.data.cache else default_cache(os.environ, Path.home())
    digest, valid_digest = _check_data(prepare(config.data, cache=cache), config)
    schedule = resolve(config.schedule, config.train.train_iters, config.optimizer.lr)
    environment = _environment(config, torch.device("cpu"), thread_count())
    topology = topology_of(config, 1)
    return schedule, record.describe(
        config,
        schedule=schedule,
        topology=topology,
        fingerprint=digest,
        environment=environment,
        valid_fingerprint=valid_digest,
    )


def _build_feeds(config: Config, cluster: Cluster, topology: Topology) -> tuple[Feed, Feed | None, Digests]:
    section, train = config.data, config.train
    cache = Path(section.cache) if section.cache else default_cache(os.environ, Path.home())
    problem: TrainerError | None = None
    digests: Digests = "", None
    if cluster.rank == 0:  # first alone, so that the others find the prepared files
        try:
            digests = _check_data(prepare(section, cache=cache), config)
        except TrainerError as error:
            problem = error
    # Tokenising and scanning may take long; a rank that dies meanwhile is heard of at once.
    cluster.board.clone(_DATA_TIMEOUT_S).agree("data", problem)
    told: list[str | None] = json.loads(cluster.board.from_rank0("data/fingerprint", json.dumps(digests).encode()))
    corpus = prepare(section, cache=cache)

    def feed(paths: tuple[Path, ...]) -> Feed:
        samples = Samples(open_token_files(paths), seq_length=train.seq_length)
        rank = topology.coordinate(cluster.rank).dp
        return Feed(samples, train.global_batch_size, train.micro_batch_size, rank, topology.dp, cluster.device)

    valid = feed(corpus.valid) if train.eval_interval else None
    return feed(corpus.train), valid, (str(told[0]), told[1])


def _build_sampler(config: Config, cluster: Cluster) -> Sampler:
    """Let rank 0 open the tokenizer, and tell all ranks the tokens of the prompt."""
    train = config.train
    problem: TrainerError | None = None
    decode: Callable[[Sequence[int]], str] = str
    prompt = b""
    if cluster.rank == 0:
        try:
            encoder = open_encoder(config.data.tokenizer)
            decode = encoder.decode
            prompt = json.dumps(prompt_tokens(encoder, train.sample_prompt, config.model.vocab_size)).encode()
        except TrainerError as error:
            problem = error
    cluster.board.agree("sampler", problem)
    return Sampler(
        prompt=json.loads(cluster.board.from_rank0("sampler/prompt", prompt)),
        max_new_tokens=train.sample_tokens,
        seq_length=train.seq_length,
        rows=train.micro_batch_size if train.compile else 1,
        seed=train.seed,
        decode=decode,
    )


def _read_tokenizer(config: Config, cluster: Cluster) -> dict[str, bytes]:
    """Let rank 0 read the tokenizer that is saved with every checkpoint, once."""
    problem: TrainerError | None = None
    found: dict[str, bytes] = {}
    if cluster.rank == 0 and config.checkpoint.save is not None:
        try:
            found = tokenizer_of(config)
        except TrainerError as error:
            problem = error
    cluster.board.agree("tokenizer", problem)
    return found


def tokenizer_of(config: Config) -> dict[str, bytes]:
    """Return the files of the tokenizer of a run, by name; none where it is not known.

    Raises:
        DataError: it cannot be read.
    """
    model = config.model
    return tokenizer_files(
        config.data, bos=model.bos_token_id, eos=model.eos_token_id, positions=model.max_position_embeddings
    )


def _check_data(corpus: Corpus, config: Config) -> Digests:
    """Return the fingerprints of the data after checking that the model's vocabulary holds every token."""
    vocab_size = config.model.vocab_size
    if corpus.vocab_size is not None and corpus.vocab_size > vocab_size:
        raise DataError(
            "The data has more tokens than the model",
            expected=f"model.vocab_size of at least {corpus.vocab_size}",
            found=vocab_size,
            fix=f"Set model.vocab_size={corpus.vocab_size}, or choose other data.",
        )
    train = open_token_files(corpus.train)
    valid = open_token_files(corpus.valid) if config.train.eval_interval else None
    for file in [*(valid or []), *train]:
        check_tokens(file, vocab_size)
    return fingerprint([scan(file) for file in train]), None if valid is None else fingerprint(
        [scan(file) for file in valid]
    )


def _adam(config: Config, schedule: Schedule) -> AdamSettings:
    section = config.optimizer
    return AdamSettings(
        lr=schedule.lr,
        weight_decay=section.weight_decay,
        beta1=section.adam_beta1,
        beta2=section.adam_beta2,
        eps=section.adam_eps,
        no_decay=record.no_decay_names(config.model),
    )


def _build_checkpointer(config: Config, cluster: Cluster) -> Checkpointer:
    section = config.checkpoint
    policy = SavePolicy(
        folder=None if section.save is None else Path(section.save),
        save_interval=section.save_interval,
        retention=Retention(section.max_checkpoint_keep, section.save_retain_interval, section.keep_best),
        file_bytes=section.file_bytes,
        commit_timeout_s=section.commit_timeout_s,
        async_save=section.async_save,
        staging_bytes=section.staging_bytes,
        stall_timeout_s=section.stall_timeout_s,
        check_replicas=section.check_replicas,
    )
    return Checkpointer(policy, cluster.board, nonce=cluster.nonce, neighbours=cluster.neighbours)


def _build_requests(config: Config, cluster: Cluster, watch: SignalWatch | None) -> Requests:
    section = config.checkpoint
    rules = RequestRules(
        exit_duration_in_mins=config.train.exit_duration_in_mins,
        save_interval_mins=section.save_interval_mins,
        give_up_after=section.exit_on_save_failure,
    )
    folder = None if section.save is None else Path(section.save)
    return Requests(rules, watch, rank=cluster.rank, folder=folder)


def _build_log(config: Config, cluster: Cluster) -> RunLog:
    device = cluster.device
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    flops = models.flops_per_token(config.model, config.train.seq_length)
    return RunLog(
        Path(config.run.dir),
        train_iters=config.train.train_iters,
        log_interval=config.logging.log_interval,
        tensorboard=config.logging.tensorboard,
        mfu_scale=None if peak is None else flops / (peak * cluster.world_size),
    )


def _environment(config: Config, device: torch.device, threads: int) -> Json:
    """Return what bits depend on besides the configuration."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": threads,
        "torch": str(torch.__version__),
        "optimizer_implementation": "fused",
        "compile": config.train.compile,
        "deterministic": config.train.deterministic,
        "activation_checkpointing": config.train.activation_checkpointing,
    }
