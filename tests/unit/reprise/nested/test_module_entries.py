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


@pytest.mark.parametrize("way", [*WAYS, "AsyncSaver"])
@pytest.mark.parametrize("make", [Scaled, Whole, Hooked])
@pytest.mark.parametrize("wrap", [lambda net: net, nn.Sequential, torch.compile], ids=["itself", "inside", "compiled"])
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
    with pytest.raises(MismatchError, match=r"/model/0\.scale is missing"):
        load(plain, nn.Sequential(Scaled()))
    assert load(plain, nn.Sequential(Scaled()), strict=False).missing_keys == ["/model/0.scale", "/model/0.weight.meta"]
    scaled = save(tmp_path / "scaled", nn.Sequential(Scaled()), iteration=1)
    with pytest.raises(MismatchError, match=r"0\.scale is unexpected"):
        load(scaled, nn.Sequential(nn.Linear(2, 2)))


def test_an_entry_that_its_module_does_not_take_is_named(tmp_path: Path) -> None:
    def made() -> nn.Module:
        net = nn.Linear(2, 2)
        net.register_state_dict_post_hook(lambda _, state, prefix, __: state.update({f"{prefix}version": "1.0"}))
        return net

    save(tmp_path, made(), iteration=1)
    with pytest.raises(PartialLoadError, match=r"does not know entries .* found /model/version"):
        load(tmp_path, made())
    assert load(tmp_path, made(), strict="missing").unexpected_keys == ["/model/version"]


def _packed(state: Any, prefix: str) -> None:
    state[f"{prefix}packed"] = (state.pop(f"{prefix}weight") * 16).to(torch.int8)


def _turned(state: Any, prefix: str) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"].T


def _halved(state: Any, prefix: str) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"].half()


def _renamed(state: Any, prefix: str) -> None:
    state[f"{prefix}rows"] = state.pop(f"{prefix}weight")


def _left_out(state: Any, prefix: str) -> None:
    del state[f"{prefix}bias"]


@pytest.mark.parametrize(
    ("change", "is_carried"), [(_packed, False), (_turned, False), (_halved, True), (_renamed, True), (_left_out, True)]
)
def test_parameters_in_another_form_are_carried_or_named(
    tmp_path: Path, change: Callable[[Any, str], None], is_carried: bool
) -> None:
    def made() -> nn.Linear:
        net = nn.Linear(2, 2)
        net.register_state_dict_post_hook(lambda _, state, prefix, __: change(state, prefix))
        return net

    net, other = made(), made()
    if is_carried:
        load(save(tmp_path, net, iteration=1), other)
        assert torch.equal(net.weight, other.weight)
        assert torch.equal(net.bias, other.bias)
    else:
        with pytest.raises(CheckpointError, match=r"in another form \(/model/weight\), found Linear"):
            save(tmp_path, net, iteration=1)


def test_a_quantized_tensor_in_an_entry_is_named(tmp_path: Path) -> None:
    class Quantized(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            packed = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)
            destination[f"{prefix}_packed_params"] = (packed, None)

    with (
        pytest.warns(UserWarning, match="deprecated"),
        pytest.raises(CheckpointError, match=r"/model/0\._packed_params/0\).*qint8"),
    ):
        save(tmp_path, nn.Sequential(Quantized(2, 2)), iteration=1)


def test_a_module_without_an_override_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    asked = []
    monkeypatch.setattr(nn.Module, "state_dict", lambda module: asked.append(module))
    load(save(tmp_path, net, iteration=1), net)
    assert asked == []


def test_an_error_of_the_module_names_it(tmp_path: Path) -> None:
    class Failing(Scaled):
        def _load_from_state_dict(self, *_: Any) -> None:
            raise KeyError("scale")

    save(tmp_path, nn.Sequential(Failing()), iteration=1)
    with pytest.raises(PartialLoadError, match=r"does not take .*\(/model/0\), found KeyError"):
        load(tmp_path, nn.Sequential(Failing()))
