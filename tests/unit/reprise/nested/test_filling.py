"""The numbers of parameter groups in a load: each parameter finds those that it had, or the load names the group."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
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


def rate(value: float) -> dict[str, Any]:
    return {"lr": torch.tensor(float(value))}


def decay(value: float) -> dict[str, Any]:
    return {"weight_decay": value}


# What was saved, what is loaded into, how strictly, and the members after the load, or the key that is named.
Groups = list[tuple[str, dict[str, Any]]]
GROUPS: dict[str, tuple[Groups, Groups, list[Any], list[dict[str, Any]] | str]] = {
    "of schedulers": ([("abc", own := {"initial_lr": 0.5, "max_lr": None, "m": [1]})], [("abc", {})], [True], [own]),
    "another dict": ([("abc", {"own": {1: [1]}})], [("abc", {"own": {"b": 2}})], [True], [{"own": {1: [1]}}]),
    "lacking": ([("abc", {"lr": 0.5})], [("abc", {"own/x": 3, "lr": 0.2})], [True], "/own~1x is missing"),
    "kept": ([("abc", {"lr": 0.5})], [("abc", {"own/x": 3, "lr": 0.2})], [False], [{"lr": 0.5, "own/x": 3}]),
    "not a default": ([("abc", {})], [("abc", {"nesterov": True, "momentum": 0.9})], [True], [{"nesterov": False}]),
    "new": ([("ab", decay(0.5))], [("ca", decay(0.25)), ("b", decay(0.75))], [True, "missing"], " is missing"),
    "new, kept": ([("ab", decay(0.5))], [("ca", decay(0.25)), ("b", {})], [False], [decay(0.25), decay(0.5)]),
    "divided": ([("abc", decay(0.5))], [("c", decay(0.25)), ("ba", decay(0.75))], [True], [decay(0.5)] * 2),
    "joined": ([("ab", decay(0.5)), ("c", decay(0.25))], [("abc", decay(0.75))], [True, "missing"], ""),
    "rates at other places": ([("a", rate(0.5)), ("bc", rate(0.25))], [("bc", rate(0)), ("a", rate(0))], [True], ""),
    "rates": (
        [("a", rate(0.5)), ("bc", rate(0.25))],
        [("a", rate(0)), ("bc", rate(0))],
        [True],
        [rate(0.5), rate(0.25)],
    ),
    "no rate": ([("abc", rate(0.5))], [("abc", {"lr": 0.2})], [True], "/lr is unexpected"),
    "a new rate": ([("abc", {"lr": 0.5})], [("abc", rate(0.2))], [True], "/lr is missing"),
}


@pytest.mark.parametrize(("old", "new", "modes", "expected"), GROUPS.values(), ids=GROUPS)
def test_a_group_has_the_numbers_of_its_parameters_or_is_named(
    tmp_path: Path, old: Groups, new: Groups, modes: list[Any], expected: Any
) -> None:
    net = model()
    path = save(tmp_path, net, sgd(net, *old), iteration=1)
    for strict in modes:
        optimizer = sgd(net, *new)
        before = repr(optimizer.param_groups)
        if isinstance(expected, str):
            with refused(MismatchError, f"/optimizer/param_groups/0{expected}"):
                load(path, net, optimizer, strict=strict)
            assert repr(optimizer.param_groups) == before
        else:
            load(path, net, optimizer, strict=strict)
            for group, members in zip(optimizer.param_groups, expected, strict=True):
                assert {key: group[key] for key in members} == members


def test_an_option_at_its_default_is_not_missing(tmp_path: Path) -> None:
    net = model()
    optimizer = sgd(net, ("abc", {"lr": 0.5}))
    del optimizer.param_groups[0]["nesterov"]  # as a version of torch before that option
    path = save(tmp_path, net, optimizer, iteration=1)
    found = load(path, net, again := sgd(net, ("abc", {})))
    assert (again.param_groups[0]["lr"], again.param_groups[0]["nesterov"], found.missing_keys) == (0.5, False, [])
    with refused(MismatchError, "param_groups/0/nesterov is missing"):
        load(path, net, sgd(net, ("abc", {"nesterov": True, "momentum": 0.9})))


def metrics(**place: object) -> Any:
    """Return an object with a tensor."""
    state: dict[str, Any] = {"loss": torch.ones(1), "count": 3}
    vars(state["loss"]).update(place)
    return SimpleNamespace(state_dict=lambda: state, load_state_dict=state.update)


PLAIN = metrics()
SHARD = metrics(global_shape=(1,), global_offsets=[(0,)], local_offsets=[(0,)], local_sizes=[(1,)])
# What was saved, and what an empty dict takes of it.
TAKEN: dict[str, tuple[Any, dict[Any, Any]]] = {
    "values": ({"loss": [0.5], "best": {"at": 3}},) * 2,
    "Counter": (Counter("aab"),) * 2,
    "by leaf": (PLAIN.state_dict(), {}),
    "shard": (SHARD, {}),
    "object": (PLAIN, PLAIN.state_dict()),
}


@pytest.mark.parametrize(("saved", "taken"), TAKEN.values(), ids=TAKEN)
def test_an_empty_dict_takes_what_a_load_returns(tmp_path: Path, saved: Any, taken: dict[Any, Any]) -> None:
    save_state_dict(tmp_path, {"model": {}, "metrics": saved}, iteration=1)
    left_out = [] if taken else ["/metrics/count", "/metrics/loss"]
    for given, problem in [({}, "/loss is unexpected"), (5, " is missing")] if left_out else []:
        with refused(MismatchError, f"/metrics{problem}"):
            load_state_dict(tmp_path, {"metrics": given})
    loaded = load_state_dict(tmp_path, state := {"metrics": dict[Any, Any](), "new": {}}, strict="missing")
    assert (state, sorted(loaded.unexpected_keys)) == ({"metrics": taken, "new": {}}, left_out)
    assert load(tmp_path, nn.Module(), strict="missing").get("metrics", {}) == taken
    assert type(state["metrics"]) is type(taken)


@pytest.mark.parametrize("strict", ["Missing", 1, None])
def test_another_value_of_strict_is_refused(tmp_path: Path, strict: Any) -> None:
    net = nn.Linear(2, 2)
    save(tmp_path, net, iteration=1)
    with refused(ConfigError, "`strict`"):
        load(tmp_path, net, strict=strict)
