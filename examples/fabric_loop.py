"""Lightning's Fabric: python examples/fabric_loop.py FOLDER 2; run it again after a kill, with 1 or 2 processes."""

import sys
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import nn

from reprise import AsyncSaver, load

MICRO_BATCHES = 2  # of an iteration, over all processes: halves and sums of two are exact in any order


def main(folder: Path, processes: int, iterations: int = 12) -> None:
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=processes)
    fabric.launch()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    parallel, wrapped = fabric.setup(model, optimizer)
    start = load(folder, model, optimizer, missing_ok=True)["iteration"]
    with AsyncSaver(folder, max_checkpoint_keep=2) as saver:
        for iteration in range(start + 1, iterations + 1):
            for number in range(fabric.global_rank, MICRO_BATCHES, fabric.world_size):
                generator = torch.Generator().manual_seed(iteration * MICRO_BATCHES + number)
                x = torch.randn(8, 16, generator=generator)
                loss = (parallel(x) - x.sum(1, keepdim=True)).square().mean()
                fabric.backward(loss * fabric.world_size / MICRO_BATCHES)
            wrapped.step()
            wrapped.zero_grad()
            if fabric.is_global_zero:
                print(iteration, model[0].weight.sum().item().hex(), flush=True)
            if iteration % 2 == 0:
                saver.save(iteration, model, optimizer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
