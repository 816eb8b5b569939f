"""`strict="model"`: names of modules are refused on either side, those of optimizers and of other state are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reprise import load, load_state_dict, save
from reprise.errors import MismatchError
from tests.messages import refused


def trained(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_an_optimizer_alone_may_differ(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    path = save(tmp_path, model, trained(model), iteration=1)
    again = trained(other := nn.Linear(2, 2), amsgrad=True, lr=0.5)
    kept = again.state[other.weight]["max_exp_avg_sq"].clone()
    with refused(MismatchError, "max_exp_avg_sq.weight is missing"):
        load(path, other, again)
    found = load(path, other, again, strict="model")
    assert found.missing_keys == ["max_exp_avg_sq.bias", "max_exp_avg_sq.weight"]
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(again.state[other.weight]["max_exp_avg_sq"], kept)
    assert again.param_groups[0]["lr"] == 1e-3
    part = torch.optim.AdamW([other.weight])
    with refused(MismatchError, "exp_avg.bias is unexpected"):
        load(path, other, part)
    assert set(load(path, other, part, strict="model").unexpected_keys) >= {"exp_avg.bias", "exp_avg_sq.bias"}
    again.state[other.weight]["exp_avg"] = torch.zeros(3)
    with refused(MismatchError, "exp_avg.weight has shape [2, 2]"):
        load(path, other, again, strict="model")


@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (2, 1)])
def test_a_model_may_not_differ(tmp_path: Path, saved: int, loaded: int) -> None:
    def layers(count: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))

    problem = "missing" if saved < loaded else "unexpected"
    path = save(tmp_path, model := layers(saved), trained(model), iteration=1, state={"ema": layers(2)})
    with refused(MismatchError, f" 1.weight is {problem}"):
        load(path, layers(loaded), strict="model")
    with refused(MismatchError, f" 1.weight is {problem}"):
        load_state_dict(path, {"model": layers(loaded).state_dict()}, strict="model")
    path = save(tmp_path, model, iteration=2, state={"ema": layers(saved)})
    with refused(MismatchError, f"/ema/1.weight is {problem}"):
        load(path, model, state={"ema": layers(loaded)}, strict="model")


def test_values_may_differ_where_the_model_may_not(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    path = save(tmp_path, model, iteration=1, state={"own": {"a": 1, "t": torch.ones(1)}})
    state = {"own": {"a": 0, "b": 5}, "further": torch.zeros(1)}
    found = load(path, model, state=state, strict="model")
    assert (state["own"], found.missing_keys) == ({"a": 1, "b": 5}, ["/further", "/own/b"])
    assert found.unexpected_keys == ["/own/t"]
