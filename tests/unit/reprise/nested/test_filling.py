"""The numbers of parameter groups in a load: each parameter finds those that it had, or the load names the group."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reprise import load, load_state_dict, save, save_state_dict
from reprise.errors import ConfigError, MismatchError
from tests.messages import refused


def model() -> nn.ParameterDict:
    return nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in "abc"})


def sgd(net: nn.ParameterDict, *groups: tuple[str, dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [net[name] for name in names], **numbers} for names, numbers in groups], lr=0.1)


def decays(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["weight_decay"] for group in optimizer.param_groups]


def saved(folder: Path, *groups: tuple[str, dict[str, Any]]) -> Path:
    net = model()
    return save(folder, net, sgd(net, *groups), iteration=1)


def test_numbers_that_schedulers_add_are_carried(tmp_path: Path) -> None:
    path = saved(tmp_path, ("abc", {"initial_lr": 0.5, "max_lr": None, "milestones": [1]}))
    net = model()
    optimizer = sgd(net, ("abc", {}))
    found = load(path, net, optimizer)
    (group,) = optimizer.param_groups
    assert (group["initial_lr"], group["max_lr"], group["milestones"]) == (0.5, None, [1])
    assert (found.missing_keys, found.unexpected_keys) == ([], [])


class Notes(nn.Module):
    """A module that gives a dict as extra state: an empty one before it has any."""

    def __init__(self, notes: dict[str, Any]) -> None:
        super().__init__()
        self.weight, self.notes = nn.Parameter(torch.ones(1)), notes

    def get_extra_state(self) -> dict[str, Any]:
        return self.notes

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.notes = state


@pytest.mark.parametrize("saved", [{"loss": [0.5], "best": {"at": 3}}, Counter("aab"), {1: 2}], ids=repr)
def test_an_empty_dict_takes_what_was_saved(tmp_path: Path, saved: dict[Any, Any]) -> None:
    save(tmp_path, Notes({"of": saved}), iteration=1, state={"metrics": saved})
    module, state = Notes({}), {"metrics": type(saved)()}
    result = load(tmp_path, module, state=state)
    assert (state["metrics"], result["metrics"], module.notes) == (saved, saved, {"of": saved})
    assert {type(found) for found in (state["metrics"], module.notes["of"])} == {type(saved)}


def test_an_empty_dict_takes_no_tensor(tmp_path: Path) -> None:
    save_state_dict(tmp_path, {"metrics": {"loss": torch.ones(1), "count": 3}}, iteration=1)
    with refused(MismatchError, "/metrics/loss is unexpected"):
        load_state_dict(tmp_path, {"metrics": {}})


def test_a_number_that_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path, ("abc", {"lr": 0.5}))
    net = model()
    optimizer = sgd(net, ("abc", {"own/scale": 3, "lr": 0.2}))
    with refused(MismatchError, "/optimizer/param_groups/0/own~1scale is missing"):
        load(path, net, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.2
    found = load(path, net, optimizer, strict=False)
    assert found.missing_keys == ["/optimizer/param_groups/0/own~1scale"]
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["own/scale"]) == (0.5, 3)


def test_an_option_at_its_default_is_not_missing(tmp_path: Path) -> None:
    net = model()
    optimizer = sgd(net, ("abc", {"lr": 0.5}))
    del optimizer.param_groups[0]["nesterov"]  # as a version of torch before that option
    path = save(tmp_path, net, optimizer, iteration=1)
    again = sgd(net, ("abc", {}))
    load(path, net, again)
    assert (again.param_groups[0]["lr"], again.param_groups[0]["nesterov"]) == (0.5, False)
    with refused(MismatchError, "param_groups/0/nesterov is missing"):
        load(path, net, sgd(net, ("abc", {"nesterov": True, "momentum": 0.9})))


@pytest.mark.parametrize(("own", "fresh"), [({"a": [1]}, 3), ({"a": 1}, {"b": 2}), (3, {"a": 1}), ({1: "x"}, None)])
def test_a_value_of_a_group_may_be_of_another_type(tmp_path: Path, own: object, fresh: object) -> None:
    path = saved(tmp_path, ("abc", {"lr": 0.5, "own": own}))
    net = model()
    optimizer = sgd(net, ("abc", {} if fresh is None else {"own": fresh}))
    load(path, net, optimizer)
    assert optimizer.param_groups[0]["own"] == own


@pytest.mark.parametrize("new", ["ca", "ac"])
def test_a_group_with_a_new_parameter_keeps_its_numbers(tmp_path: Path, new: str) -> None:
    path = saved(tmp_path, ("ab", {"weight_decay": 0.5}))
    net = model()
    optimizer = sgd(net, (new, {"weight_decay": 0.25}), ("b", {"weight_decay": 0.75}))
    for strict in (True, "missing"):
        with refused(MismatchError, "/optimizer/param_groups/0 is missing"):
            load(path, net, optimizer, strict=strict)
    found = load(path, net, optimizer, strict=False)
    assert found.missing_keys == ["/optimizer/param_groups/0"]
    assert decays(optimizer) == [0.25, 0.5]


@pytest.mark.parametrize("strict", ["Missing", 1, None])
def test_another_value_of_strict_is_refused(tmp_path: Path, strict: Any) -> None:
    net = nn.Linear(2, 2)
    save(tmp_path, net, iteration=1)
    with refused(ConfigError, "`strict`"):
        load(tmp_path, net, strict=strict)


def test_one_group_becomes_two_of_its_numbers(tmp_path: Path) -> None:
    path = saved(tmp_path, ("abc", {"weight_decay": 0.5}))
    optimizer = sgd(net := model(), ("c", {"weight_decay": 0.25}), ("ba", {"weight_decay": 0.75}))
    load(path, net, optimizer)
    assert decays(optimizer) == [0.5, 0.5]


def rate(value: float) -> dict[str, Any]:
    return {"lr": torch.tensor(float(value))}


# What was saved, what is loaded into, and what is named: groups that were another, and rates that are tensors.
OTHERS = [
    ([("ab", {"weight_decay": 0.5}), ("c", {"weight_decay": 0.25})], [("abc", {"weight_decay": 0.75})], ""),
    ([("a", rate(0.5)), ("bc", rate(0.25))], [("bc", rate(0)), ("a", rate(0))], ""),
    ([("abc", rate(0.5))], [("abc", {"lr": 0.2})], "/lr is unexpected"),
    ([("abc", {"lr": 0.5})], [("abc", rate(0.2))], "/lr is missing"),
]


@pytest.mark.parametrize(("old", "new", "place"), OTHERS)
def test_two_groups_of_other_numbers_do_not_become_one(tmp_path: Path, old: Any, new: Any, place: str) -> None:
    path, optimizer = saved(tmp_path, *old), sgd(net := model(), *new)
    before = repr(optimizer.param_groups)
    with refused(MismatchError, f"/optimizer/param_groups/0{place}"):
        load(path, net, optimizer)
    assert repr(optimizer.param_groups) == before


def test_groups_with_tensors_keep_their_places(tmp_path: Path) -> None:
    path = saved(tmp_path, ("a", rate(0.5)), ("bc", rate(0.25)))
    optimizer = sgd(net := model(), ("a", rate(0)), ("bc", rate(0)))
    load(path, net, optimizer)
    assert [group["lr"].item() for group in optimizer.param_groups] == [0.5, 0.25]
