"""accelerate: accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py FOLDER; again after a kill."""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from reprise import AsyncSaver, load


def main(folder: Path, iterations: int = 12) -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
    parallel, wrapped, schedule = accelerator.prepare(model, optimizer, schedule)
    torch.manual_seed(accelerator.process_index)
    state = {"schedule": schedule}
    start = load(folder, model, optimizer, state=state, rng=True, missing_ok=True)["iteration"]
    with AsyncSaver(folder, max_checkpoint_keep=2) as saver:
        for iteration in range(start + 1, iterations + 1):
            seed = iteration * accelerator.num_processes + accelerator.process_index
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
            loss = (parallel(x) - x.sum(1, keepdim=True)).square().mean()
            accelerator.backward(loss)
            wrapped.step()
            schedule.step()
            wrapped.zero_grad()
            print(iteration, loss.item().hex(), flush=True)
            if iteration % 2 == 0:
                saver.save(iteration, model, optimizer, state=state, rng=True)
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
