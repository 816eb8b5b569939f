"""A module's tensors and extra state come back, and any other entry of its `state_dict()` is refused by its key."""

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
from reprise.errors import CheckpointError, MismatchError
from tests.distributed.odd_modules import CARRIED, REFUSED, SIZE
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


@pytest.mark.parametrize("kind", CARRIED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_a_module_of_any_form_comes_back(tmp_path: Path, way: str, kind: Callable[..., nn.Module]) -> None:
    saving, loading, wrap = WAYS[way]
    module, other = kind(random.Random(1)), kind(random.Random(2))
    output(module)
    expected = output(copy.deepcopy(module))
    saving(tmp_path, wrap(module))
    loading(tmp_path, wrap(other))
    assert output(other) == expected


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_an_entry_of_its_own_is_refused_by_key(tmp_path: Path, kind: Callable[..., nn.Module]) -> None:
    module = nn.Sequential(torch.compile(kind(random.Random(1))))
    with refused(CheckpointError, f"/model/0.{REFUSED[kind]}"):
        save(tmp_path, module, iteration=1)
    path = save(tmp_path, nn.Sequential(nn.Linear(SIZE, SIZE)), iteration=1)
    with pytest.raises(CheckpointError, match=REFUSED[kind]):
        load(path, module)


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


def test_extra_state_that_one_side_alone_has_is_named(tmp_path: Path) -> None:
    plain, extra = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(Extra(1))
    path = save(tmp_path / "plain", plain, iteration=1)
    with refused(MismatchError, "/model/0._extra_state is missing"):
        load(path, extra)
    assert load(path, extra, strict=False).missing_keys == ["/model/0._extra_state"]
    path = save(tmp_path / "extra", extra, iteration=1)
    with refused(MismatchError, "0._extra_state is unexpected"):
        load(path, plain)


def test_extra_state_that_nothing_takes_is_unexpected(tmp_path: Path) -> None:
    class Note(nn.Linear):
        def get_extra_state(self) -> str:
            return "about this module"

    path = save(tmp_path, Note(2, 2), iteration=1)
    with refused(MismatchError, "/model/_extra_state is unexpected"):
        load(path, Note(2, 2))
    assert load(path, Note(2, 2), strict="missing").unexpected_keys == ["/model/_extra_state"]
