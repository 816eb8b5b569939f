"""accelerate: accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py FOLDER; on 1 or 2 after a kill."""

import random
import sys
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch import nn

from reprise import AsyncSaver, load
from reprise.integrations.accelerate import parts_of

MICRO_BATCHES = 2  # of an iteration, over all processes: halves and sums of two are exact in any order


def main(folder: Path, iterations: int = 12) -> None:
    processes = accelerate.PartialState(cpu=True).num_processes
    accelerator = accelerate.Accelerator(
        gradient_accumulation_steps=MICRO_BATCHES // processes, step_scheduler_with_optimizer=False
    )
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
    parallel, wrapped, schedule = accelerator.prepare(model, optimizer, schedule)
    random.seed(accelerator.process_index)
    saver = AsyncSaver(folder, max_checkpoint_keep=2)
    start = load(folder, **parts_of(accelerator), rng="if_same_ranks", missing_ok=True)["iteration"]
    for iteration in range(start + 1, iterations + 1):
        for number in range(accelerator.process_index, MICRO_BATCHES, processes):
            with accelerator.accumulate(parallel):
                generator = torch.Generator().manual_seed(iteration * MICRO_BATCHES + number)
                x = torch.randn(8, 16, generator=generator)
                loss = (parallel(x) - x.sum(1, keepdim=True)).square().mean()
                accelerator.backward(loss)
                wrapped.step()
                wrapped.zero_grad()
        schedule.step()
        print(iteration, model[0].weight.sum().item().hex(), random.random().hex(), flush=True)
        if iteration % 2 == 0:
            saver.save(iteration, **parts_of(accelerator), rng=True)
    saver.close()
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
