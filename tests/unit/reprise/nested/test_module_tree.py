"""A model and its optimizer as a state dict: extra state, and optimizers that keep more than torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reprise import load, load_state_dict, save, save_state_dict
from reprise.errors import CheckpointError, MismatchError
from tests.messages import refused


class Scaled(nn.Linear):
    """A module with state that is no parameter or buffer."""

    def __init__(self, scale: Any) -> None:
        super().__init__(2, 2)
        self.scale = scale

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state


VALUES: dict[str, tuple[Any, Any]] = {
    "number": (3, 4),
    "dict": (
        {"amax": torch.tensor([1.5]), "names": {0: "x"}, "steps": [1]},
        {"amax": torch.zeros(1), "names": {}, "steps": []},
    ),
    "tuple": ({"empty": ()}, {"empty": (1, 2)}),
    "tensor": (torch.tensor([7], dtype=torch.uint8), torch.tensor([0], dtype=torch.uint8)),
    "list": ([torch.tensor([1.5]), 2, torch.tensor([2.5])], [torch.zeros(1), 0, torch.zeros(1)]),
    "none": (None, None),
}
values = pytest.mark.parametrize(("value", "other"), VALUES.values(), ids=VALUES)


@values
@pytest.mark.parametrize("is_fresh", [False, True])
def test_extra_state_of_modules_is_carried(tmp_path: Path, value: Any, other: Any, is_fresh: bool) -> None:
    source, target = nn.Sequential(Scaled(value)), nn.Sequential(Scaled(None if is_fresh else other))
    by_module = save(tmp_path / "module", source, iteration=1)
    for path in (by_module, save_state_dict(tmp_path / "dict", {"model": source.state_dict()}, iteration=1)):
        load(path, target)
        assert repr(target[0].scale) == repr(value)
        if not is_fresh:
            state = {"model": nn.Sequential(Scaled(other)).state_dict()}
            load_state_dict(path, state)
            assert repr(state["model"]["0._extra_state"]) == repr(value)


def test_extra_state_that_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    with refused(CheckpointError, "/model/0._extra_state/f"):
        save(tmp_path, nn.Sequential(Scaled({"f": len})), iteration=1)
    path = save(tmp_path, nn.Sequential(nn.Linear(2, 2)), iteration=1)
    with refused(MismatchError, "/model/0._extra_state is missing"):
        load(path, nn.Sequential(Scaled(1)))


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


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ({"model": {}}, "/model"),
        ({"optimizer": {}}, "/optimizer"),
        ({"per_rank": {1: 2}}, "/per_rank"),
        ({"files": {"x": "\ud800"}}, "`files`, x"),
    ],
    ids=["model", "optimizer", "per_rank", "files"],
)
def test_an_argument_of_another_kind_is_named(tmp_path: Path, arguments: dict[str, Any], place: str) -> None:
    with refused(CheckpointError, f"({place})"):
        save(tmp_path, **{"model": nn.Linear(2, 2), "iteration": 1, **arguments})


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
