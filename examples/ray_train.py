"""Ray Train: python examples/ray_train.py FOLDER 2; run it again after a kill, with 1 or 2 workers."""

import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn

from reprise import AsyncSaver, load

MICRO_BATCHES = 2  # of an iteration, over all workers: halves and sums of two are exact in any order


def work(config: dict[str, Any]) -> None:
    context = train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    parallel = prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    start = load(config["folder"], model, optimizer, missing_ok=True)["iteration"]
    with AsyncSaver(config["folder"], max_checkpoint_keep=2) as saver:
        for iteration in range(start + 1, config["iterations"] + 1):
            for number in range(rank, MICRO_BATCHES, workers):
                generator = torch.Generator().manual_seed(iteration * MICRO_BATCHES + number)
                x = torch.randn(8, 16, generator=generator)
                loss = (parallel(x) - x.sum(1, keepdim=True)).square().mean()
                (loss * workers / MICRO_BATCHES).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                print(iteration, model[0].weight.sum().item().hex(), flush=True)
            if iteration % 2 == 0:
                saver.save(iteration, model, optimizer)


def main(folder: Path, workers: int, iterations: int = 12) -> None:
    ray.init(include_dashboard=False)
    TorchTrainer(
        work,
        train_loop_config={"folder": str(folder.absolute()), "iterations": iterations},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=train.ScalingConfig(num_workers=workers),
        run_config=train.RunConfig(storage_path=f"{folder.absolute()}.ray"),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
