"""The checkpoint library on a model of somebody else, wrapped by somebody else's `fully_shard`."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.harness import call_on_ranks
from trainer.checkpoint import load, save


class Net(nn.Module):
    """Something with a norm that keeps statistics, an uneven width and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.inner = nn.Linear(5, 5)
        self.out = nn.Linear(5, 7, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(self.norm(self.table(x))))


def _build() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(7)
    net = Net()
    if dist.is_initialized():
        fully_shard(net.inner)
        fully_shard(net)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def _step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.arange(7)).square().sum().backward()
    optimizer.step()


def _save_and_load(arguments: list[str]) -> None:
    """Train two steps, save, spoil everything, run a forward without gradients, load, and save again."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world_size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    net, optimizer = _build()
    for _ in range(2):
        _step(net, optimizer)
    with torch.no_grad():
        net.eval()(torch.arange(7))
    save(arguments[0], net, optimizer, iteration=2, state={"note": "ours"})
    _step(net.train(), optimizer)
    with torch.no_grad():
        net.eval()(torch.arange(7))
    assert load(arguments[0], net, optimizer) == {"note": "ours", "iteration": 2}
    save(arguments[1], net, optimizer, iteration=2)
    dist.barrier()
    dist.destroy_process_group()


def test_a_foreign_sharded_model_is_saved_and_loads_anywhere(tmp_path: Path) -> None:
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    ended = call_on_ranks(_save_and_load, folders, folder=tmp_path / "ranks", ranks=3, timeout_s=60.0)
    assert ended.ok, ended.text
    first, second = (load_file(Path(f, "iter_0000002/model.safetensors")) for f in folders)
    assert set(first) == {"table.weight", "inner.weight", "inner.bias", "norm.weight", "norm.bias"} | {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    assert all(torch.equal(first[name], second[name]) for name in first)

    alone, optimizer = _build()
    load(folders[0], alone, optimizer)
    assert all(torch.equal(first[name], value) for name, value in alone.state_dict().items() if name in first)
    assert alone.out.weight is alone.table.weight
    assert all(optimizer.state[p]["step"] == 2 for p in alone.parameters())
