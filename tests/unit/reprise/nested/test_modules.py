"""What a module's own `state_dict()` has beyond its tensors comes back with them, or is refused by its key."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reprise import AsyncSaver, load, load_state_dict, save, save_state_dict
from reprise.errors import CheckpointError, MismatchError, PartialLoadError
from tests.distributed.odd_modules import CARRIED, REFUSED, SIZE, Informs, Overrides, Packed, SavesMore, Turned
from tests.messages import refused


def _by_saver(folder: Path, net: nn.Module) -> None:
    with AsyncSaver(folder) as saver:
        saver.save(1, net)
        for module in net.modules():
            if isinstance(getattr(module, "scale", None), torch.Tensor):  # as a later step may
                module.scale.mul_(2)


# How a module is saved, loaded and wrapped.
WAYS: dict[str, tuple[Callable[..., object], Callable[..., object], Callable[[nn.Module], nn.Module]]] = {
    "save": (lambda at, net: save(at, net, iteration=1), load, nn.Sequential),
    "save_state_dict": (
        lambda at, net: save_state_dict(at, {"model": net}, iteration=1),
        lambda at, net: load_state_dict(at, {"model": net}),
        torch.compile,
    ),
    "state": (
        lambda at, net: save(at, nn.Linear(1, 1), iteration=1, state={"metric": net}),
        lambda at, net: load(at, nn.Linear(1, 1), state={"metric": net}),
        lambda net: net,
    ),
    "AsyncSaver": (_by_saver, load, nn.Sequential),
}


def output(module: nn.Module) -> Any:
    return module(torch.ones(2, SIZE)).tolist()


@pytest.mark.parametrize("kind", [*CARRIED, Packed, Turned], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_a_module_of_any_form_comes_back_or_is_named(tmp_path: Path, way: str, kind: Callable[..., nn.Module]) -> None:
    saving, loading, wrap = WAYS[way]
    module, other = kind(random.Random(1)), kind(random.Random(1))
    output(module)
    expected = output(copy.deepcopy(module))
    if kind in REFUSED:
        with refused(CheckpointError, "weight"):
            saving(tmp_path, wrap(module))
    else:
        saving(tmp_path, wrap(module))
        loading(tmp_path, wrap(other))
        assert output(other) == expected


def test_entries_that_one_side_alone_has_are_named(tmp_path: Path) -> None:
    plain = save(tmp_path / "plain", nn.Sequential(nn.Linear(SIZE, SIZE)), iteration=1)
    scaled = nn.Sequential(SavesMore(random.Random(1)))
    with refused(MismatchError, "/model/0.scale is missing"):
        load(plain, scaled)
    assert load(plain, scaled, strict=False).missing_keys == ["/model/0.scale"]
    path = save(tmp_path / "scaled", scaled, iteration=1)
    with refused(MismatchError, "0.scale is unexpected"):
        load(path, nn.Sequential(nn.Linear(SIZE, SIZE)))


def test_an_entry_that_its_module_does_not_take_is_named(tmp_path: Path) -> None:
    net = Informs(random.Random(1))
    save(tmp_path, net, iteration=1)
    with refused(PartialLoadError, "/model/informs"):
        load(tmp_path, net)
    assert load(tmp_path, net, strict="missing").unexpected_keys == ["/model/informs"]


def test_an_error_of_the_module_names_it(tmp_path: Path) -> None:
    class Failing(SavesMore):
        def _load_from_state_dict(self, *_: Any) -> None:
            raise KeyError("scale")

    net = nn.Sequential(Failing(random.Random(1)))
    save(tmp_path, net, iteration=1)
    with refused(PartialLoadError, "/model", "KeyError"):
        load(tmp_path, net)


def test_an_overridden_load_is_called_on_the_model_alone(tmp_path: Path) -> None:
    module, other = Overrides(random.Random(1)), Overrides(random.Random(2))
    load(save(tmp_path / "outer", module, iteration=1), other)
    assert output(other) == output(module)
    nested = nn.Sequential(module)
    with refused(PartialLoadError, "/model/0.own"):  # as torch's load_state_dict does
        load(save(tmp_path / "inner", nested, iteration=1), nested)


class Caches(nn.Linear):
    """A module whose cache, an entry of its own, is made by its first call or by a load."""

    cache: torch.Tensor | None = None

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.cache is not None:
            destination[f"{prefix}cache"] = self.cache

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        self.cache = state_dict.pop(f"{prefix}cache", None)
        super()._load_from_state_dict(state_dict, prefix, *others)


def test_a_new_entry_reaches_a_module_within_a_compiled_one(tmp_path: Path) -> None:
    module, other = Caches(2, 2), Caches(2, 2)
    module.cache = torch.tensor([1.5])
    path = save(tmp_path, nn.Sequential(torch.compile(nn.Sequential(module))), iteration=1)
    load(path, nn.Sequential(torch.compile(nn.Sequential(other))))
    assert other.cache == module.cache


def _leave_out_weight(_: nn.Module, state: dict[str, Any], prefix: str, __: object) -> None:
    del state[f"{prefix}weight"]


def test_a_module_with_a_longer_name_may_leave_out_a_tensor(tmp_path: Path) -> None:
    net = nn.ModuleDict({"layer1": Caches(2, 2), "layer10": nn.Linear(2, 2)})
    net["layer1"].cache = torch.tensor([1.5])
    net["layer10"]._register_state_dict_hook(_leave_out_weight)
    other = copy.deepcopy(net)
    nn.init.zeros_(other["layer10"].weight)
    load(save(tmp_path, net, iteration=1), other)
    assert other["layer10"].weight.equal(net["layer10"].weight)


class Extra(nn.Linear):
    """A module with state that is no parameter or buffer."""

    def __init__(self, scale: Any) -> None:
        super().__init__(2, 2)
        self.scale = scale

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state


VALUES: dict[str, tuple[Any, Any]] = {
    "dict": (
        {"amax": torch.tensor([1.5]), "names": {0: "x"}, "steps": [1]},
        {"amax": torch.zeros(1), "names": {}, "steps": []},
    ),
    "list": ([torch.tensor([1.5]), 2, torch.tensor([2.5])], [torch.zeros(1), 0, torch.zeros(1)]),
    "none": (None, None),
}
values = pytest.mark.parametrize(("value", "other"), VALUES.values(), ids=VALUES)


def shown(value: Any) -> str:
    """Return a value as text. A dict that was stored by leaf may have another order."""
    return repr(sorted(value.items()) if isinstance(value, dict) else value)


@values
@pytest.mark.parametrize("is_fresh", [False, True])
def test_extra_state_of_modules_is_carried(tmp_path: Path, value: Any, other: Any, is_fresh: bool) -> None:
    source, target = nn.Sequential(Extra(value)), nn.Sequential(Extra(None if is_fresh else other))
    by_module = save(tmp_path / "module", source, iteration=1)
    for path in (by_module, save_state_dict(tmp_path / "dict", {"model": source.state_dict()}, iteration=1)):
        load(path, target)
        assert shown(target[0].scale) == shown(value)
        if not is_fresh:
            state = {"model": nn.Sequential(Extra(other)).state_dict()}
            load_state_dict(path, state)
            assert shown(state["model"]["0._extra_state"]) == shown(value)
