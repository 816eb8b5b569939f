"""`save_state_dict` and `load_state_dict` on one rank: nested state, tied tensors, optimizers, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
)

from reprise import load_state_dict, save_state_dict
from reprise.errors import CheckpointError, ConfigError, MismatchError
from tests.messages import refused
from tests.states import Net, assert_same, assert_same_optimizer, trained


def test_tied_tensors_are_found_by_memory_and_stored_once(tmp_path: Path) -> None:
    net = Net()
    state = {"model": net.state_dict(), "mirror": {"again": net.embed.weight.detach(), "own": net.frozen.clone()}}
    path = save_state_dict(tmp_path, state, iteration=1)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["aliases"] == {"/mirror/again": "embed.weight", "head.weight": "embed.weight"}
    assert set(load_file(path / "extra/extra-00001-of-00001.safetensors")) == {"/mirror/own"}
    untied = {name: value.clone() for name, value in Net().state_dict().items()}
    load_state_dict(path, {"model": untied})
    assert_same(dict(net.state_dict()), untied)
    with pytest.raises(MismatchError, match=r"found head.weight is unexpected\.$"):  # it may have other bits
        load_state_dict(save_state_dict(tmp_path / "untied", {"model": untied}, iteration=1), {"model": state["model"]})
    for number, names in enumerate((reversed(net.state_dict()), [n for n in net.state_dict() if n != "embed.weight"])):
        stored = {name: net.state_dict()[name] for name in names}  # the other name comes first, or alone
        save_state_dict(tmp_path / str(number), {"model": stored}, iteration=1)
        tied = Net()
        load_state_dict(tmp_path / str(number), {"model": tied.state_dict()})
        assert_same(net.state_dict(), tied.state_dict())


def numbered(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("is_named", [True, False])
def test_a_numbered_optimizer_is_mapped_in_both_directions(tmp_path: Path, is_named: bool) -> None:
    """With `model=` or with the names that an optimizer of named parameters keeps."""

    def optimizer_of(net: Net) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.named_parameters() if is_named else net.parameters(), lr=0.01)

    net = Net()
    optimizer = optimizer_of(net)
    net(torch.arange(7)).backward()
    optimizer.step()
    save_state_dict(tmp_path, numbered(net, optimizer), iteration=1, model=None if is_named else net)
    fresh = Net()
    again = optimizer_of(fresh)
    state = numbered(fresh, again)
    load_state_dict(tmp_path, state, model=fresh)
    again.load_state_dict(state["optimizer"])
    assert_same_optimizer(optimizer, again)
    names = load_file(tmp_path / "iter_0000001/optimizer/optimizer-00001-of-00001.safetensors")
    assert "exp_avg.norm.weight" in names


def test_a_flat_optimizer_alone_is_a_state_dict_too(tmp_path: Path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(*trained(), options=options)
    save_state_dict(tmp_path, state, iteration=1)
    again = get_optimizer_state_dict(*trained(), options=options)
    again["param_groups.embed.weight.lr"] = 9.0
    load_state_dict(tmp_path, again)
    assert_same(again, state)


def test_memory_that_overlaps_otherwise_is_refused(tmp_path: Path) -> None:
    memory = torch.zeros(10)
    for other, part in ((memory[:6], memory[4:]), (memory, memory.view(2, 5))):
        with refused(CheckpointError, "/a and /b"):
            save_state_dict(tmp_path, {"a": other, "b": part}, iteration=1)
    save_state_dict(tmp_path, {"a": memory[:5], "b": memory[5:]}, iteration=1)


def test_numbers_without_certain_names_are_refused(tmp_path: Path) -> None:
    net, optimizer = trained()
    reverse = torch.optim.AdamW(list(net.parameters())[::-1])
    net(torch.arange(7)).backward()
    reverse.step()
    for given, model, words in (
        (optimizer, None, ["/optimizer", "get_optimizer_state_dict", "model="]),
        (optimizer, net, ["2 groups", "named_parameters"]),
        (reverse, net, ["/optimizer/state/", "/exp_avg"]),
    ):
        with refused(CheckpointError, *words):
            save_state_dict(tmp_path, numbered(net, given), iteration=1, model=model)
    assert not list(tmp_path.glob("iter_*"))


class Odd:
    """Something of a program's own."""

    def state_dict(self) -> dict[str, Any]:
        return {}


class Point(NamedTuple):
    x: int


class Color(IntEnum):
    """A number that a load could not make again."""

    RED = 1


def itself() -> dict[str, Any]:
    found: dict[str, Any] = {"first": ONE}
    found["in"] = found
    return found


ONE = torch.ones(1)
# What cannot be stored, and the place and value that are named.
REFUSED: list[tuple[Callable[[], Any], list[str]]] = [
    (lambda: {1: ONE}, ["outermost keys", "found 1"]),
    (lambda: {"\ud800": ONE}, ["UTF-8"]),
    (lambda: {"milestones": {30: ONE}}, ["/milestones", "30"]),
    (lambda: {"a": {3: [0, Color.RED]}}, ["/a/3/1", "Color"]),
    (lambda: {"model": Odd()}, ["/model", "Odd", "state_dict()"]),
    (lambda: {"p": Point(1)}, ["/p"]),
    (lambda: {"r": type("Rows", (list,), {})([1])}, ["/r"]),
    (
        lambda: {"o": {"state": {}, "param_groups": [{"params": ["v"], "f": {"a": ONE}}]}},
        ["/o/param_groups/0/f/a"],
    ),
    (lambda: {"a": [itself()]}, ["/a/0/in/in/..."]),
    (lambda: {"model": {"rotary": torch.empty(2, dtype=torch.uint4)}}, ["rotary", "uint4"]),
    (lambda: {"s": torch.eye(2).to_sparse()}, ["/s"]),
    (lambda: {"n": torch.nested.nested_tensor([ONE, torch.ones(2)])}, ["/n", "nested"]),
    (lambda: {"m": torch.zeros(1, device="meta")}, ["/m"]),
    (lambda: [ONE], ["list"]),
    (lambda: {"model": {"exp_avg.w": torch.zeros(1)}, "optimizer": {"state": {"w": {"exp_avg": ONE}}}}, ["exp_avg.w"]),
    (lambda: {"o": {"state": {"w": {}}, "param_groups": [{"params": ["v"]}]}}, ["(/o)"]),
    (lambda: {"d": torch.zeros([1] * 65)}, ["/d", "65"]),
    (lambda: {"s": SimpleNamespace(state_dict=itself, load_state_dict=print)}, ["/s/in/in/in/..."]),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_what_cannot_be_stored_is_refused_by_name(tmp_path: Path, make: Callable[[], Any], words: list[str]) -> None:
    with refused(CheckpointError, *words):
        save_state_dict(tmp_path, make(), iteration=1)
    assert list(tmp_path.iterdir()) == []


def test_a_group_needs_a_process_group(tmp_path: Path) -> None:
    with refused(ConfigError, "init_process_group"):
        save_state_dict(tmp_path, {"a": 1}, iteration=1, coordinator_rank=1)


def test_a_value_in_a_tuple_cannot_be_filled(tmp_path: Path) -> None:
    path = save_state_dict(tmp_path, {"pair": (ONE, 3)}, iteration=1)
    with refused(CheckpointError, "/pair/1"):
        load_state_dict(path, {"pair": (torch.ones(1), 3)})
    load_state_dict(path, {"pair": [torch.ones(1), 0]})
