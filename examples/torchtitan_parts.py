"""torchtitan's parts: torchrun --nproc-per-node 2 examples/torchtitan_parts.py FOLDER; on 1 or 2 ranks after a kill."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from reprise.integrations.torchtitan import RepriseManager

MICRO_BATCHES = 2  # of an iteration, over all ranks: halves and sums of two are exact in any order


class CheckpointManager(RepriseManager, BaseCheckpointManager):
    """A manager that saves with Reprise: `Trainer.Config(checkpoint=CheckpointManager.Config(enable=True))`."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's settings."""


def main(folder: Path, iterations: int = 12) -> None:
    alone: Any = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    dist.init_process_group("gloo", **alone)
    torch.manual_seed(0)
    parts: Any = [nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 1))]
    fully_shard(parts[0])
    adam = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})
    optimizers = OptimizersContainer.Config(param_groups=[adam], implementation="for-loop").build(model_parts=parts)
    schedules = LRSchedulersContainer.Config(warmup_steps=4).build(optimizers=optimizers, training_steps=iterations)
    state = {"step": 0}
    given: Any = {"dataloader": None, "model_parts": parts, "optimizers": optimizers, "lr_schedulers": schedules}
    config = CheckpointManager.Config(enable=True, folder=str(folder), interval=2, keep_latest_k=2)
    manager: Any = config.build(**given, states={"train_state": state}, sd_adapter=None)
    manager.load()
    while state["step"] < iterations:
        state["step"] += 1
        for number in range(dist.get_rank(), MICRO_BATCHES, dist.get_world_size()):
            generator = torch.Generator().manual_seed(state["step"] * MICRO_BATCHES + number)
            x = torch.randn(8, 16, generator=generator)
            ((parts[0](x) - x.sum(1, keepdim=True)).square().mean() * dist.get_world_size() / MICRO_BATCHES).backward()
        optimizers.step()
        schedules.step()
        optimizers.zero_grad()
        print(state["step"], parts[0][0].weight.full_tensor().sum().item().hex(), flush=True)
        manager.save(state["step"], last_step=state["step"] == iterations)
    manager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
