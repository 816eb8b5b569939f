"""A state dict with an average of the weights: python examples/nested_state.py FOLDER; run it again after a kill."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from reprise import AsyncSaver, load_state_dict


def main(folder: Path, iterations: int = 12) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "ema": {name: value.clone() for name, value in model.state_dict().items()},
        "iteration": 0,
    }
    load_state_dict(folder, state, missing_ok=True)  # the tensors are the model's and the optimizer's own
    with AsyncSaver(folder, max_checkpoint_keep=2) as saver:
        while state["iteration"] < iterations:
            state["iteration"] += 1
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(state["iteration"]))
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, value in model.state_dict().items():
                state["ema"][name].lerp_(value, 0.1)
            print(state["iteration"], loss.item().hex(), state["ema"]["0.bias"].sum().item().hex(), flush=True)
            if state["iteration"] % 2 == 0:
                saver.save_state_dict(state["iteration"], state)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
