"""Trains models of transformers with torch's own AdamW on our batches, saves and loads them with torch's own DCP."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from models.config import ModelConfig
from models.families import hf_config
from tests.harness import TINY, compose
from trainer.config.schema import Config
from trainer.data.batches import Samples
from trainer.data.corpus import default_cache, prepare
from trainer.data.loader import BatchLoader
from trainer.data.token_file import open_token_file
from trainer.interop.source import StateSource

SAVED, TOTAL = 3, 6  # iterations when the producer saves, and to which both sides go on

# The same training on both sides; a high rate, so that three steps change the loss in its second digit.
TRAINING = [
    *TINY,
    "train.micro_batch_size=12",
    f"train.train_iters={TOTAL}",
    "schedule=constant",
    "schedule.lr_warmup_iters=0",
    "optimizer.lr=0.01",
    "optimizer.weight_decay=0.1",
    "optimizer.adam_beta2=0.9",
    "checkpoint.async_save=false",
]
GPT2 = [*TRAINING, "model=gpt2_tiny"]
LLAMA = [*TRAINING, "model=llama3_tiny", "model.n_head=4", "model.n_embd=24", "model.n_kv_head=2"]


def overrides_of(family: str) -> list[str]:
    """Return the overrides of the tiny run of a family."""
    return {"gpt2": GPT2, "llama": LLAMA, "llama-tied": [*LLAMA, "model.tie_word_embeddings=true"]}[family]


def batches(config: Config, count: int = TOTAL) -> list[torch.Tensor]:
    """Return the global batches of the first iterations in our order, int64 [samples, seq_length + 1]."""
    train = config.train
    corpus = prepare(config.data, cache=default_cache(os.environ, Path.home()))
    samples = Samples([open_token_file(path) for path in corpus.train], seq_length=train.seq_length)
    size = train.global_batch_size
    feed = BatchLoader(samples, size, size, [0], torch.device("cpu"))
    return [feed.train_batch(number * size, train.seed, size)[0] for number in range(count)]


def make(config: ModelConfig, *, seed: int = 1) -> Any:
    """Return a stock model of transformers, with random weights."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_config(config)))


def make_adamw(model: nn.Module, config: Config, *, groups: int = 2, lr: float | None = None) -> torch.optim.AdamW:
    """Return torch's AdamW as it is by default, over parameters with and without weight decay, or over one group."""
    section = config.optimizer
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    members = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        members if groups == 2 else [*matrices, *others],
        lr=section.lr if lr is None else lr,
        betas=(section.adam_beta1, section.adam_beta2),
        eps=section.adam_eps,
        weight_decay=section.weight_decay,
    )


def trained(config: Config, data: list[torch.Tensor]) -> tuple[StateSource, list[float]]:
    """Return the state that torch itself has trained from the first batches, and its losses on the others."""
    model = make(config.model)
    optimizer = make_adamw(model, config)
    for batch in data[:SAVED]:
        step(model, optimizer, batch)
    tensors = {
        f"{key}.{name}" if key else name: value.clone()
        for name, parameter in model.named_parameters()
        for key, value in {"": parameter.detach(), **optimizer.state[parameter]}.items()
    }
    state = StateSource(config.model, SAVED, has_optimizer=True, read=tensors.__getitem__)
    return state, [step(model, optimizer, batch) for batch in data[SAVED:]]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    """Train on a batch, of which each rank takes its share, and return the loss before the step."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    mine = batch.chunk(ranks)[rank]
    logits = model(mine[:, :-1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), mine[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / ranks
    if ranks > 1:
        dist.all_reduce(mean)
    return mean.item()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, *, flat: bool) -> dict[str, Any]:
    """Return model and optimizer as torch's documentation has them saved."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer, options=options)}


def load_into(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, *, flat: bool) -> None:
    """Fill model and optimizer from a folder as torch's documentation has it."""
    state = state_of(model, optimizer, flat=flat)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_optimizer_state_dict(model, optimizer, state["optim"], options=options)


def sharded(model: Any) -> Any:
    """Return the model under FSDP2: each block by itself, then the rest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.transformer.h if hasattr(model, "transformer") else model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def trained_by_fsdp2(config: Config) -> tuple[list[torch.Tensor], Any, torch.optim.Optimizer]:
    """Join the ranks, and return the data, and a model and its optimizer after the first `SAVED` steps."""
    dist.init_process_group("gloo")
    data, model = batches(config), sharded(make(config.model))
    optimizer = make_adamw(model, config)
    for batch in data[:SAVED]:
        step(model, optimizer, batch)
    return data, model, optimizer


def fsdp2_job(arguments: list[str]) -> None:
    """On each of two ranks: train and save by FSDP2, then fill another model from an export of ours and go on.

    Args:
        arguments: the family, the folder to save to, the export to load, and where rank 0 writes both lists of losses.
    """
    family, saved, export, losses = arguments
    config = compose(overrides_of(family))
    data, model, optimizer = trained_by_fsdp2(config)
    dcp.save({**state_of(model, optimizer, flat=False), "epoch": 1}, checkpoint_id=saved)
    theirs = [step(model, optimizer, batch) for batch in data[SAVED:]]

    model = sharded(make(config.model, seed=2))
    optimizer = make_adamw(model, config, lr=5.0)
    load_into(model, optimizer, Path(export), flat=False)
    ours = [step(model, optimizer, batch) for batch in data[SAVED:]]
    if dist.get_rank() == 0:
        Path(losses).write_text(json.dumps([theirs, ours]))
    dist.barrier()
    dist.destroy_process_group()


def by_rank_job(arguments: list[str]) -> None:
    """On each of two ranks: train and save by FSDP2 as another program saves, and go on.

    Args:
        arguments: the program, the family, the folder to save to, and where rank 0 writes its losses.
    """
    program, family, saved, losses = arguments
    config = compose(overrides_of(family))
    data, model, optimizer = trained_by_fsdp2(config)
    if program == "transformers":
        from transformers.distributed.checkpoint import _save_model_checkpoint_distributed, save_optimizer_distributed

        _save_model_checkpoint_distributed(model, saved)
        save_optimizer_distributed(model, optimizer, saved)
    else:
        _save_by_torch_checkpointing(model, optimizer, saved)
    theirs = [step(model, optimizer, batch) for batch in data[SAVED:]]
    if dist.get_rank() == 0:
        Path(losses).write_text(json.dumps(theirs))
    dist.barrier()
    dist.destroy_process_group()


def _save_by_torch_checkpointing(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Save as torchtitan's manager of torch_checkpointing does, but while the caller waits."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.schema import ItemSpec
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def gathered(_: object, data: object, process_group: object = None) -> dict[int, object]:
        parts: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, data)
        return dict(enumerate(parts))

    DefaultMetadataManager._all_gather_pickled_data = gathered  # its own is for CUDA alone
    by_item = dict.fromkeys(("model", "optimizer"), ItemSpec(resharder=DefaultResharder()))
    settings = CheckpointManager.Config(
        items=by_item,
        save=SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    )
    manager = CheckpointManager(settings)
    state = state_of(model, optimizer, flat=False)
    manager.save(folder, {"model": state["model"], "optimizer": state["optim"], "train_state": {"step": SAVED}})
    manager.close()
    dist.barrier()
