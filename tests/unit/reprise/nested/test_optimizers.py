"""Optimizers as state dicts: state of any kind, and optimizers that keep more than torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reprise import load, load_state_dict, save, save_state_dict
from reprise.errors import CheckpointError
from tests.messages import refused


def test_an_entry_beside_the_groups_is_filled_in_its_dict(tmp_path: Path) -> None:
    def state(count: int) -> dict[str, Any]:
        return {"optimizer": {"state": {}, "param_groups": [{"params": ["w"], "lr": 0.5}], "count": count}}

    load_state_dict(save_state_dict(tmp_path, state(3), iteration=1), again := state(0))
    assert again == state(3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_of_another_dtype_goes_into_a_fresh_optimizer(tmp_path: Path, dtype: torch.dtype) -> None:
    def made() -> tuple[nn.Linear, torch.optim.Optimizer]:
        net = nn.Linear(3, 2, dtype=dtype)
        return net, torch.optim.Adafactor(net.parameters())

    net, optimizer = made()
    net(torch.ones(3, dtype=dtype)).sum().backward()
    optimizer.step()
    again, fresh = made()
    load(save(tmp_path, net, optimizer, iteration=1), again, fresh)
    expected, loaded = (repr([sorted(o.state[p].items()) for p in o.state]) for o in (optimizer, fresh))
    assert loaded == expected


class Counting(torch.optim.SGD):
    """An optimizer whose state dict holds more than its groups and the state of its parameters."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": 3}


class Halved(torch.optim.SGD):
    """An optimizer whose state dict holds other values than its groups."""

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        return {**found, "param_groups": [{**group, "lr": group["lr"] / 2} for group in found["param_groups"]]}


class Wrapped(torch.optim.SGD):
    """An optimizer whose state dict is torch's."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


def test_a_state_dict_of_an_optimizer_s_own_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for kind, where in ((Counting, "/optimizer/count"), (Halved, "/optimizer/param_groups/0/lr")):
        with refused(CheckpointError, f"({where})", kind.__name__):
            save(tmp_path, model, kind(model.parameters(), lr=0.5, momentum=0.9), iteration=1)
    save(tmp_path, model, Wrapped(model.parameters(), lr=0.5), iteration=1)


@pytest.mark.parametrize(("history_size", "steps"), [(100, 0), (2, 2), (100, 1)])
@pytest.mark.parametrize("is_by_dict", [False, True])
def test_the_history_of_lbfgs_is_carried_into_a_fresh_optimizer(
    tmp_path: Path, history_size: int, steps: int, is_by_dict: bool
) -> None:
    data = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))

    def made() -> tuple[nn.Module, torch.optim.LBFGS]:
        net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5), nn.Linear(5, 1).to(torch.complex64))
        return net, torch.optim.LBFGS(net.parameters(), max_iter=2, history_size=history_size)

    def step(net: nn.Module, optimizer: torch.optim.LBFGS) -> str:
        def closure() -> float:
            optimizer.zero_grad()
            loss = net[2](net[:2](data).to(torch.complex64)).abs().square().mean()
            loss.backward()
            return float(loss.detach())

        return float(optimizer.step(closure)).hex()

    (net, optimizer), (again, fresh) = made(), made()
    for _ in range(steps):
        step(net, optimizer)
    if is_by_dict:
        save_state_dict(tmp_path, {"model": net, "optimizer": optimizer}, iteration=1)
        load_state_dict(tmp_path, {"model": again, "optimizer": fresh})
    else:
        load(save(tmp_path, net, optimizer, iteration=1), again, fresh)
    expected, found = (repr(sorted(o.state_dict()["state"].get(0, {}).items())) for o in (optimizer, fresh))
    assert found == expected
    assert [step(net, optimizer) for _ in range(4)] == [step(again, fresh) for _ in range(4)]


def test_a_tied_weight_is_no_state_of_an_optimizer(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    net.head = nn.Module()
    net.head.weight = net.weight  # stored as the alias head.weight, which reads as state of the parameter weight
    optimizer = torch.optim.SGD(net.parameters())
    load(save(tmp_path, net, optimizer, iteration=1), net, optimizer)
    assert not optimizer.state
