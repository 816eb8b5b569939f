"""Optimizers by the names of their parameters: state of any form, and optimizers that keep more than torch's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reprise import load, load_state_dict, save, save_state_dict
from reprise.errors import CheckpointError
from tests.distributed.odd_modules import tensors_in
from tests.messages import refused


def test_an_entry_beside_the_groups_is_filled_in_its_dict(tmp_path: Path) -> None:
    def state(count: int) -> dict[str, Any]:
        return {"optimizer": {"state": {}, "param_groups": [{"params": ["w"], "lr": 0.5}], "count": count}}

    load_state_dict(save_state_dict(tmp_path, state(3), iteration=1), again := state(0))
    assert again == state(3)


class Own(torch.optim.SGD):
    """An optimizer with its own state dict."""

    def __init__(self, net: nn.Module, **more: Any) -> None:
        super().__init__(net.parameters(), lr=0.5)
        self.more = more

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self.more}


class Around(torch.optim.Optimizer):
    """Has the content of another, as accelerated optimizers do: torch's constructor never ran for it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.param_groups, self.state, self.state_dict_of = inner.param_groups, inner.state, inner.state_dict
        self.defaults = inner.defaults

    def state_dict(self) -> dict[str, Any]:
        return self.state_dict_of()


def test_further_content_of_a_state_dict_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for place, optimizer in (("count", Own(model, count=3)), ("state/shared", Own(model, state={"shared": 3}))):
        with refused(CheckpointError, f"(/optimizer/{place})", "Own"):
            save(tmp_path, model, optimizer, iteration=1)
    save(tmp_path, model, Own(model), iteration=1)
    save(tmp_path, model, Around(Own(model)), iteration=2)


def test_a_tied_weight_is_no_state_of_an_optimizer(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    net.head = nn.Module()
    net.head.weight = net.weight  # stored as the alias head.weight, which reads as state of the parameter weight
    optimizer = torch.optim.SGD(net.parameters())
    load(save(tmp_path, net, optimizer, iteration=1), net, optimizer)
    assert not optimizer.state


class Given(torch.optim.SGD):
    """An optimizer with any state."""

    def __init__(self, net: nn.Module, values: dict[str, Any] | None = None) -> None:
        super().__init__(net.parameters(), lr=0.5)
        if values is not None:
            self.state[self.parameter] = values

    @property
    def parameter(self) -> nn.Parameter:
        """Return its first parameter."""
        parameter = self.param_groups[0]["params"][0]
        assert isinstance(parameter, nn.Parameter)
        return parameter


STATE: dict[str, dict[str, Any]] = {
    "list": {"statistics": [torch.eye(3), torch.eye(4)]},
    "tuple": {"pair": (torch.ones(2), None, (1, "x"))},
    "dict": {"by_dim": {0: torch.ones(3), 1: [torch.zeros(4)]}},
    "numbered dict": {"by_dim": {"0": torch.ones(3), "1": torch.zeros(4)}},
    "ordered dict": {"by_dim": OrderedDict([("z", torch.ones(3)), ("a", {"b": torch.zeros(0)})])},
    "values": {"history": [1, 2.5, (3,)], "kinds": {"a": {"b": None}}, "nothing": {}},
    "stacked": {"momenta": torch.rand(5, 3, 4)},
    "gram": {"gram": torch.rand(12, 12)},
    "bfloat16": {"exp_avg": torch.rand(3, 4).bfloat16(), "exp_avg_sq": torch.rand(3, 4).double()},
    "integers": {"exp_avg": torch.arange(12, dtype=torch.int8).view(3, 4), "mask": torch.ones(3, 4, dtype=torch.bool)},
    "complex": {"spectrum": torch.rand(3, 4).to(torch.complex64), "parts": [torch.rand(2).to(torch.complex128)]},
    "float8": {"exp_avg": torch.rand(3, 4).to(torch.float8_e4m3fn), "lower": torch.ones(2).to(torch.float8_e5m2fnuz)},
    "orders": {
        "basis": torch.rand(3, 4).T,
        "parts": [torch.rand(2, 5, 3).permute(2, 0, 1), torch.rand(2, 2).cfloat().T],
    },
    "keys": {"a.b": torch.ones(1), "c/d": [torch.ones(1)], "step": 3},
}


def _by_calls(path: Path, net: nn.Module, optimizer: torch.optim.Optimizer, again: Any, fresh: Any) -> None:
    load(save(path, net, optimizer, iteration=1), again, fresh)


def _by_objects(path: Path, net: nn.Module, optimizer: torch.optim.Optimizer, again: Any, fresh: Any) -> None:
    save_state_dict(path, {"model": net, "optimizer": optimizer}, iteration=1)
    load_state_dict(path, {"model": again, "optimizer": fresh})


def _by_numbers(path: Path, net: nn.Module, optimizer: torch.optim.Optimizer, again: Any, fresh: Any) -> None:
    save_state_dict(path, {"its": optimizer.state_dict()}, model=net, iteration=1)
    load_state_dict(path, state := {"its": fresh.state_dict()}, model=again)
    fresh.state[fresh.parameter] = state["its"]["state"][0]


WAYS = [(carry, is_fresh) for carry in (_by_calls, _by_objects, _by_numbers) for is_fresh in (True, False)]


@pytest.mark.parametrize(
    ("values", "carry", "is_fresh"),
    [
        pytest.param(
            STATE[name], *way, id=f"{name}-{second}", marks=() if (first + second) % 6 == 0 else pytest.mark.slow
        )
        for first, name in enumerate(STATE)
        for second, way in enumerate(WAYS)
    ],
)
def test_state_of_any_form_comes_back(
    tmp_path: Path, values: dict[str, Any], carry: Callable[..., None], is_fresh: bool
) -> None:
    net, again = nn.Linear(4, 3), nn.Linear(4, 3)
    other = None if is_fresh else {key: _zeroed(value) for key, value in values.items()}
    carry(tmp_path, net, Given(net, values), again, fresh := Given(again, other))
    found = fresh.state[fresh.parameter]
    assert sorted(map(repr, found.items())) == sorted(map(repr, values.items()))
    if is_fresh:
        pairs = zip(*(tensors_in([each[key] for key in sorted(each)]) for each in (values, found)), strict=True)
        assert all(old.stride() == new.stride() for old, new in pairs)


def _zeroed(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else [] if isinstance(value, list) else value


@pytest.mark.parametrize(("old", "new"), [(0.5, torch.ones(1)), (torch.ones(1), 0.5), ([1, torch.ones(1)], None)])
def test_state_of_another_kind_is_replaced(tmp_path: Path, old: Any, new: Any) -> None:
    net, again = nn.Linear(4, 3), nn.Linear(4, 3)
    path = save(tmp_path, net, Given(net, {"t": old}), iteration=1)
    load(path, again, stepped := Given(again, {"t": new}))
    assert repr(stepped.state[stepped.parameter]) == repr({"t": old})


def test_tied_state_of_a_fresh_optimizer_is_tied_again(tmp_path: Path) -> None:
    net, again = nn.Linear(4, 3), nn.Linear(4, 3)
    optimizer = Given(net, {"a": torch.ones(3, 4)})
    values = optimizer.state[optimizer.parameter]
    values.update(b=values["a"], step=values["a"], c=[values["a"], torch.ones(2)], weight=optimizer.parameter.detach())
    load(save(tmp_path, net, optimizer, iteration=1), again, fresh := Given(again))
    found = fresh.state[fresh.parameter]
    found["a"].fill_(7)
    with torch.no_grad():
        again.weight.fill_(8)
    assert (found["b"][0, 0], found["step"][0, 0], found["c"][0][0, 0], found["weight"][0, 0]) == (7, 7, 7, 8)


def test_tensors_that_a_fresh_group_lacks_come_back(tmp_path: Path) -> None:
    net, again = nn.Linear(4, 3), nn.Linear(4, 3)
    optimizer, fresh = Given(net), Given(again)
    optimizer.param_groups[0]["distance"] = torch.tensor([2.5])
    load(save(tmp_path, net, optimizer, iteration=1), again, fresh)
    assert torch.equal(fresh.param_groups[0]["distance"], torch.tensor([2.5]))
