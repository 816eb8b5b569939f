"""torch's pipelining: torchrun --nproc-per-node 2 examples/pipeline.py FOLDER; run it again after a kill."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from reprise import AsyncSaver, load_state_dict


class Stage(nn.Module):
    """Some layers of the model, named by their numbers in the whole of it."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(16, 16) for number in numbers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def main(folder: Path, iterations: int = 12) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = Stage(range(2 * rank, 2 * rank + 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = ScheduleGPipe(PipelineStage(model, rank, ranks, torch.device("cpu")), 2, nn.functional.mse_loss)
    # Each stage gives its own tensors; the checkpoint has all of them.
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    start = load_state_dict(folder, state, missing_ok=True)["iteration"]
    with AsyncSaver(folder, max_checkpoint_keep=2) as saver:
        for iteration in range(start + 1, iterations + 1):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(iteration))
            losses: list[torch.Tensor] = []
            last: dict[str, Any] = {"target": x.flip(1), "losses": losses} if rank == ranks - 1 else {}
            schedule.step(*([x] if rank == 0 else []), **last)
            optimizer.step()
            optimizer.zero_grad()
            print(iteration, *(float(loss).hex() for loss in losses), flush=True)
            if iteration % 2 == 0:
                saver.save_state_dict(iteration, state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
