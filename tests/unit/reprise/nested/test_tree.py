"""Objects with a state of their own, and tensors, in `state`: what a loop saves beside its model and optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

from reprise import load, load_state_dict, save, save_state_dict
from reprise.errors import CheckpointError, PartialLoadError
from tests.messages import refused
from tests.states import assert_same, assert_same_optimizer

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": lambda given: lr_scheduler.OneCycleLR(given, 0.1, total_steps=20),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "sequence": lambda given: lr_scheduler.SequentialLR(
        given, [lr_scheduler.LinearLR(given, 0.1), lr_scheduler.ExponentialLR(given, 0.9)], [3]
    ),
}


class Loader:
    """A loader with a position, as torchdata's: before the first batch its state has other keys than after."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.gave = 0

    def state_dict(self) -> dict[str, Any]:
        self.gave += 1
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Shadow:
    """An average that keeps a list of tensors, and gives the list itself."""

    def __init__(self, values: list[torch.Tensor]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.9, "shadow": self.values, "by_number": {3: self.values[0] + 1}, "none": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["by_number"].keys() == {3}
        self.values = state["shadow"]


def made(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    model(torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_modules_and_optimizers_in_state_are_filled(tmp_path: Path) -> None:
    def all_of(seed: int) -> tuple[list[nn.Module], list[torch.optim.Optimizer], dict[str, Any]]:
        (model, optimizer), (critic, inner) = made(seed), made(seed + 10)
        both = torch.optim.SGD([*model.parameters(), *critic.parameters()], lr=0.1 + seed, momentum=0.9)
        ema = AveragedModel(model)
        state = {"ema": ema, "critic": critic, "inner": [inner], "both": both}
        return [model, critic, ema], [optimizer, inner, both], state

    modules, optimizers, state = all_of(0)
    for number, optimizer in enumerate(optimizers):
        step(modules[number % 2], optimizer, number)
    state["ema"].update_parameters(modules[0])
    save(tmp_path, modules[0], optimizers[0], iteration=1, state=state)
    others, again, target = all_of(1)
    kept = target["ema"].module[0].weight
    load(tmp_path, others[0], again[0], state=target)
    assert target["ema"].module[0].weight is kept
    assert target["ema"].n_averaged == 1
    for module, other in zip(modules, others, strict=True):
        assert_same(module.state_dict(), other.state_dict())
    for optimizer, other in zip(optimizers, again, strict=True):
        assert_same_optimizer(optimizer, other)
    assert load(tmp_path, others[0]).keys() == {"iteration"}


def test_a_state_whose_keys_change_needs_no_template(tmp_path: Path) -> None:
    model, optimizer = made()
    loader, shadow = Loader(), Shadow([torch.arange(3), torch.randn(2)])
    loader.state = {
        "worker_0": {"generator": torch.arange(4, dtype=torch.uint8), "sizes": (1, 2)},
        "count": Counter("aab"),
    }
    save(tmp_path, model, optimizer, iteration=1, state={"loader": loader, "shadow": shadow})
    target, new = Loader(), Shadow([torch.zeros(1, device="meta")])
    load(tmp_path, model, optimizer, state={"loader": target, "shadow": new})
    assert_same(target.state, loader.state)
    assert_same(new.values, shadow.values)
    assert all(tensor.data_ptr() != old.data_ptr() for tensor, old in zip(new.values, shadow.values, strict=True))
    loader.state = None  # type: ignore[assignment]
    save(tmp_path, model, iteration=2, state={"loader": loader})
    gave = target.gave
    load(tmp_path, model, state={"loader": target})
    assert (target.state, target.gave) == (None, gave)  # without tensors, a load asks for no state


def test_tensors_given_to_a_load_are_filled(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": torch.randn(3), "list": [torch.ones(2), 5], "later": torch.ones(1), "number": 1}
    save(tmp_path, made()[0], iteration=1, state=state)
    target: dict[str, Any] = {"a": torch.zeros(3), "list": [torch.zeros(2), 0], "later": None}
    kept = target["a"]
    loaded = load(tmp_path, made()[0], state=target)
    assert target["a"] is kept
    assert_same(dict(loaded), {**state, "iteration": 1})
    assert_same(target, {key: state[key] for key in target})
    other = {"list": [torch.zeros(2), 0]}
    load_state_dict(tmp_path, other)
    assert_same(other, {"list": state["list"]})


def test_an_object_that_refuses_its_state_is_named(tmp_path: Path) -> None:
    model, optimizer = made()
    save(tmp_path, model, optimizer, iteration=1, state={"scaler": GradScaler("cpu", enabled=False)})
    with refused(PartialLoadError, "/scaler", "RuntimeError"):
        load(tmp_path, model, optimizer, state={"scaler": GradScaler("cpu")})


def test_a_first_start_keeps_what_is_given(tmp_path: Path) -> None:
    loader = Loader()
    state = {"loader": loader, "epoch": 0}
    assert load(tmp_path / "none", made()[0], state=state, missing_ok=True) == {**state, "iteration": 0}
    assert loader.state == {}


@pytest.mark.parametrize(("name", "is_by_dict"), [*((name, False) for name in SCHEDULES), ("one cycle", True)])
def test_an_object_and_its_dict_load_each_other(tmp_path: Path, name: str, is_by_dict: bool) -> None:
    def loop(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model, optimizer = made(seed)
        return model, optimizer, SCHEDULES[name](optimizer)

    model, optimizer, schedule = loop(0)
    for number in range(3):
        step(model, optimizer, number)
        schedule.step(*([1.0] if name == "plateau" else []))
    given = {"model": model, "optimizer": optimizer, "schedule": schedule.state_dict() if is_by_dict else schedule}
    save(tmp_path / "calls", model, optimizer, iteration=1, state={"schedule": given["schedule"]})
    save_state_dict(tmp_path / "dict", given, iteration=1)
    for folder in ("calls", "dict"):
        other, again, target = loop(1)
        load_state_dict(tmp_path / folder, {"model": other, "optimizer": again, "schedule": target})
        assert_same(model.state_dict(), other.state_dict())
        assert_same_optimizer(optimizer, again)
        state = SCHEDULES[name](again).state_dict()
        assert load(tmp_path / folder, *made(2))["schedule"] == schedule.state_dict()
        load(tmp_path / folder, *made(2), state={"schedule": state})
        assert_same(schedule.state_dict(), target.state_dict())
        assert_same(schedule.state_dict(), state)


def test_an_object_takes_values_that_were_saved_without_one(tmp_path: Path) -> None:
    values = [torch.tensor([1.0]), torch.tensor([2.0])]
    save_state_dict(tmp_path, {"it": {"shadow": values, "by_number": {3: 5}}}, iteration=2)  # by leaf
    load(tmp_path, nn.Module(), state={"it": (other := Shadow([torch.zeros(1), torch.zeros(1)]))})
    assert_same(values, other.values)


def test_a_state_that_cannot_be_stored_is_named_by_key(tmp_path: Path) -> None:
    loader = Loader()
    loader.state = {"worker": [1, object()]}
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters())
    for value, place in ((loader, "/it/worker/1"), (stranger, "/it")):
        with refused(CheckpointError, place):
            save(tmp_path, made()[0], iteration=1, state={"it": value})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ({"model": {}}, "/model"),
        ({"optimizer": {}}, "/optimizer"),
        ({"per_rank": {1: 2}}, "/per_rank/0"),
        ({"files": {"x": "\ud800"}}, "`files`, x"),
    ],
    ids=["model", "optimizer", "per_rank", "files"],
)
def test_an_argument_of_another_kind_is_named(tmp_path: Path, arguments: dict[str, Any], place: str) -> None:
    with refused(CheckpointError, f"({place})"):
        save(tmp_path, **{"model": nn.Linear(2, 2), "iteration": 1, **arguments})
