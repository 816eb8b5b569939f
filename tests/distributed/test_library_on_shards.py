"""The checkpoint library on a model of somebody else, wrapped by somebody else's `fully_shard`."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from reprise import load, load_state_dict, save, save_state_dict
from tests.distributed.programs import refused, run_programs


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


def save_and_load(folder: Path, _: int) -> None:
    """Train two steps, save, spoil everything, run a forward without gradients, load, and save again."""
    net, optimizer = _build()
    for _ in range(2):
        _step(net, optimizer)
    with torch.no_grad():
        net.eval()(torch.arange(7))
    save(folder / "a", net, optimizer, iteration=2, state={"note": "ours"})
    _step(net.train(), optimizer)
    with torch.no_grad():
        net.eval()(torch.arange(7))
    assert load(folder / "a", net, optimizer) == {"note": "ours", "iteration": 2}
    save(folder / "b", net, optimizer, iteration=2)


def test_a_foreign_sharded_model_is_saved_and_loads_anywhere(tmp_path: Path) -> None:
    folder = run_programs([save_and_load], tmp_path, ranks=3)["save_and_load"].folder
    first, second = (load_file(folder / name / "iter_0000002/model.safetensors") for name in "ab")
    linear, norm = {"table.weight", "inner.weight", "inner.bias"}, {"norm.weight", "norm.bias"}
    assert set(first) == {*linear, *norm, "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert all(torch.equal(first[name], second[name]) for name in first)

    alone, optimizer = _build()
    load(folder / "a", alone, optimizer)
    assert all(torch.equal(first[name], value) for name, value in alone.state_dict().items() if name in first)
    assert alone.out.weight is alone.table.weight
    assert all(optimizer.state[p]["step"] == 2 for p in alone.parameters())


def _fill(net: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(value)


def give_flat_shards(folder: Path, _: int) -> None:
    """Give a module of FSDP1 whose shards are equal on both ranks, and then its state dict of DTensors."""
    net = nn.Sequential(nn.Linear(4, 4, bias=False))
    mesh = init_device_mesh("cpu", (2,))
    net[0] = FullyShardedDataParallel(net[0], use_orig_params=True, device_mesh=mesh, device_id=torch.device("cpu"))
    _fill(net, 1.0)
    refused(lambda: save(folder, net, iteration=1))
    refused(lambda: save_state_dict(folder, {"ema": net}, iteration=1))
    given = get_model_state_dict(net)
    save_state_dict(folder, {"model": given}, iteration=2)
    refused(lambda: load(folder, net))
    _fill(net, 0.0)
    given = get_model_state_dict(net)
    load_state_dict(folder, {"model": given})
    set_model_state_dict(net, given)
    with FullyShardedDataParallel.summon_full_params(net):
        assert torch.equal(net[0].weight, torch.ones(4, 4))


def test_flat_shards_of_fsdp1_are_refused_by_name(tmp_path: Path) -> None:
    outcome = run_programs([give_flat_shards], tmp_path)["give_flat_shards"]
    for lines in outcome.refusals():
        assert all("FSDP1" in line for line in lines)
        assert ["/model/0" in line for line in lines] == [True, False, True]
        assert "/ema/0" in lines[1]
    assert load_file(outcome.folder / "iter_0000002" / "model.safetensors")["0.weight"].shape == (4, 4)
