"""A plain training loop: python examples/plain_loop.py FOLDER; run it again after a kill."""

import sys
from pathlib import Path

import torch
from torch import nn

from reprise import AsyncSaver, load


def main(folder: Path, iterations: int = 12) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
    state = {"schedule": schedule}
    start = load(folder, model, optimizer, state=state, missing_ok=True)["iteration"]
    with AsyncSaver(folder, max_checkpoint_keep=2) as saver:
        for iteration in range(start + 1, iterations + 1):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(iteration))
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            print(iteration, loss.item().hex(), flush=True)
            if iteration % 2 == 0:
                saver.save(iteration, model, optimizer, state=state)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
