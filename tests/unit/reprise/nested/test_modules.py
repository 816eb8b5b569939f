"""What a module's own `state_dict()` has beyond its tensors comes back with them, or is refused by its key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reprise import AsyncSaver, load, load_state_dict, save, save_state_dict
from reprise.errors import CheckpointError, MismatchError, PartialLoadError
from tests.messages import refused


class Scaled(nn.Linear):
    """A layer with a scale that is neither a parameter nor a buffer; None before its first use."""

    def __init__(self, scale: float | None = 1.0) -> None:
        super().__init__(2, 2)
        self.scale = None if scale is None else torch.tensor([scale], dtype=torch.bfloat16)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.scale is not None:
            destination[f"{prefix}scale"] = self.scale
            destination[f"{prefix}weight.meta"] = {"kind": ("int4", None), 3: [self.scale + 1]}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.scale = state_dict.pop(f"{prefix}scale", self.scale)
        self.meta = state_dict.pop(f"{prefix}weight.meta", None)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Whole(Scaled):
    """A layer with a `state_dict` and a `load_state_dict` of its own."""

    _save_to_state_dict = nn.Linear._save_to_state_dict
    _load_from_state_dict = nn.Linear._load_from_state_dict

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {**super().state_dict(*args, **options), "own": {"scale": self.scale}}

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        rest = dict(state_dict)
        self.scale = rest.pop("own")["scale"]
        return super().load_state_dict(rest, *args, **options)


class Hooked(Scaled):
    """A layer whose hooks add the scale, and take it back."""

    _save_to_state_dict = nn.Linear._save_to_state_dict
    _load_from_state_dict = nn.Linear._load_from_state_dict

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(scale)
        self.register_state_dict_post_hook(lambda m, state, prefix, _: state.update({f"{prefix}scale": m.scale}))
        self.register_load_state_dict_pre_hook(self._take)

    @staticmethod
    def _take(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
        module.scale = state_dict.pop(f"{prefix}scale")


WAYS: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "save": (lambda at, net: save(at, net, iteration=1), load),
    "save_state_dict": (
        lambda at, net: save_state_dict(at, {"model": net}, iteration=1),
        lambda at, net: load_state_dict(at, {"model": net}),
    ),
    "state": (
        lambda at, net: save(at, nn.Linear(1, 1), iteration=1, state={"metric": net}),
        lambda at, net: load(at, nn.Linear(1, 1), state={"metric": net}),
    ),
}


@pytest.mark.parametrize(
    ("way", "make", "wrap"),
    [
        pytest.param(way, make, wrap, marks=() if third == (first + second) % 2 else pytest.mark.slow)
        for first, way in enumerate([*WAYS, "AsyncSaver"])
        for second, make in enumerate([Scaled, Whole, Hooked])
        for third, wrap in enumerate([lambda net: net, nn.Sequential, torch.compile])
    ],
)
def test_further_entries_come_back(
    tmp_path: Path, way: str, make: type[Scaled], wrap: Callable[[nn.Module], nn.Module]
) -> None:
    layer, other = make(3.0), make(5.0)
    if way == "AsyncSaver":
        with AsyncSaver(tmp_path) as saver:
            saver.save(1, wrap(layer))
            layer.scale.mul_(2)  # as a later step may
        load(tmp_path, wrap(other))
    else:
        saving, loading = WAYS[way]
        saving(tmp_path, wrap(layer))
        loading(tmp_path, wrap(other))
    assert other.scale == torch.tensor([3.0])
    assert other.scale.dtype == torch.bfloat16
    assert torch.equal(other.weight, layer.weight)


def test_entries_that_a_fresh_module_lacks_come_back(tmp_path: Path) -> None:
    save(tmp_path, nn.Sequential(Scaled(3.0)), iteration=1)
    fresh = Scaled(None)
    load(tmp_path, nn.Sequential(fresh))
    assert repr((fresh.scale, fresh.meta)) == repr(
        (torch.tensor([3.0], dtype=torch.bfloat16), {"kind": ("int4", None), 3: [torch.tensor([4.0]).bfloat16()]})
    )


def test_entries_that_one_side_alone_has_are_named(tmp_path: Path) -> None:
    plain = save(tmp_path / "plain", nn.Sequential(nn.Linear(2, 2)), iteration=1)
    with refused(MismatchError, "/model/0.scale is missing"):
        load(plain, nn.Sequential(Scaled()))
    assert load(plain, nn.Sequential(Scaled()), strict=False).missing_keys == ["/model/0.scale", "/model/0.weight.meta"]
    scaled = save(tmp_path / "scaled", nn.Sequential(Scaled()), iteration=1)
    with refused(MismatchError, "0.scale is unexpected"):
        load(scaled, nn.Sequential(nn.Linear(2, 2)))


def test_an_entry_that_its_module_does_not_take_is_named(tmp_path: Path) -> None:
    def made() -> nn.Module:
        net = nn.Linear(2, 2)
        net.register_state_dict_post_hook(lambda _, state, prefix, __: state.update({f"{prefix}version": "1.0"}))
        return net

    save(tmp_path, made(), iteration=1)
    with refused(PartialLoadError, "/model/version"):
        load(tmp_path, made())
    assert load(tmp_path, made(), strict="missing").unexpected_keys == ["/model/version"]


Change = Callable[[Any, str], object]


@pytest.mark.parametrize(
    ("change", "is_carried"),
    [
        (lambda state, name: state.update(packed=(state.pop(name) * 16).to(torch.int8)), False),
        (lambda state, name: state.update({name: state[name].T}), False),
        (lambda state, name: state.update({name: state[name].half()}), True),
        (lambda state, name: state.update(rows=state.pop(name)), True),
        (lambda state, _: state.pop("bias"), True),
    ],
)
def test_parameters_in_another_form_are_carried_or_named(tmp_path: Path, change: Change, is_carried: bool) -> None:
    def hook(_: nn.Module, state: Any, prefix: str, __: object) -> None:
        change(state, f"{prefix}weight")

    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    for module in (net, other):
        module.register_state_dict_post_hook(hook)
    if is_carried:
        load(save(tmp_path, net, iteration=1), other)
        assert torch.equal(net.weight, other.weight)
        assert torch.equal(net.bias, other.bias)
    else:
        with refused(CheckpointError, "/model/weight", "Linear"):
            save(tmp_path, net, iteration=1)


def test_an_error_of_the_module_names_it(tmp_path: Path) -> None:
    class Failing(Scaled):
        def _load_from_state_dict(self, *_: Any) -> None:
            raise KeyError("scale")

    save(tmp_path, nn.Sequential(Failing()), iteration=1)
    with refused(PartialLoadError, "/model/0", "KeyError"):
        load(tmp_path, nn.Sequential(Failing()))


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
    source, target = nn.Sequential(Extra(value)), nn.Sequential(Extra(None if is_fresh else other))
    by_module = save(tmp_path / "module", source, iteration=1)
    for path in (by_module, save_state_dict(tmp_path / "dict", {"model": source.state_dict()}, iteration=1)):
        load(path, target)
        assert repr(target[0].scale) == repr(value)
        if not is_fresh:
            state = {"model": nn.Sequential(Extra(other)).state_dict()}
            load_state_dict(path, state)
            assert repr(state["model"]["0._extra_state"]) == repr(value)


def test_extra_state_that_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    with refused(CheckpointError, "/model/0._extra_state/f"):
        save(tmp_path, nn.Sequential(Extra({"f": len})), iteration=1)
    path = save(tmp_path, nn.Sequential(nn.Linear(2, 2)), iteration=1)
    with refused(MismatchError, "/model/0._extra_state is missing"):
        load(path, nn.Sequential(Extra(1)))
