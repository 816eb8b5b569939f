"""DDP with BatchNorm: torchrun --nproc-per-node 2 examples/ddp_batchnorm.py FOLDER; run it again after a kill."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from reprise import AsyncSaver, load

# Each rank's statistics are those of its own samples; DDP gives all ranks those of rank 0 before the next forward.
STATISTICS = ["*.running_*"]


def main(folder: Path, iterations: int = 12) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    start = load(folder, model, optimizer, missing_ok=True)["iteration"]
    with AsyncSaver(folder, max_checkpoint_keep=2, from_rank0=STATISTICS) as saver:
        for iteration in range(start + 1, iterations + 1):
            seed = iteration * dist.get_world_size() + dist.get_rank()
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
            loss = (parallel(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(iteration, loss.item().hex(), flush=True)
            if iteration % 2 == 0:
                saver.save(iteration, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
