"""A whole loop, down to its random numbers: python examples/whole_loop.py FOLDER [spawn]; run it again after a kill."""

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Generator, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, Sampler

from reprise import AsyncSaver, load


class Noise(Dataset[torch.Tensor]):
    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.randn(16, generator=Generator().manual_seed(number))


class Shuffled(Sampler[int]):
    def __init__(self, size: int) -> None:
        self.size, self.epoch, self.used = size, 0, 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.size, generator=Generator().manual_seed(self.epoch))
        return iter(order[self.used :].tolist())


def main(folder: Path, method: str = "fork", iterations: int = 12) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 1))
    ema = AveragedModel(model, avg_fn=lambda old, new, _: old.lerp(new, 0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=iterations)
    scaler = torch.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    sampler = Shuffled(48)
    loader = DataLoader(Noise(), 8, None, sampler, num_workers=2, multiprocessing_context=method, generator=Generator())
    state = {"ema": ema, "schedule": schedule, "scaler": scaler, "sampler": vars(sampler)}
    iteration = load(folder, model, optimizer, state=state, rng=True, missing_ok=True)["iteration"]
    with AsyncSaver(folder, max_checkpoint_keep=2) as saver:
        while iteration < iterations:
            for x in islice(loader, iterations - iteration):
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                schedule.step()
                ema.update_parameters(model)
                iteration, sampler.used = iteration + 1, sampler.used + len(x)
                print(iteration, loss.item().hex(), flush=True)
                if iteration % 2 == 0:
                    saver.save(iteration, model, optimizer, state=state, rng=True)
            sampler.epoch, sampler.used = sampler.epoch + 1, 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), "".join(sys.argv[2:]) or "fork")
