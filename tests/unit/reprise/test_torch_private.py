"""The installed torch has every private name where the project looks for it."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest

from reprise import torch_private


def moved(names: dict[str, str]) -> list[str]:
    """Return the names that are no longer in their modules."""

    def has(module: str, name: str) -> bool:
        try:
            return hasattr(import_module(module), name)
        except ImportError:
            return False

    return [
        f"{module}.{name}" for module, members in names.items() for name in members.split() if not has(module, name)
    ]


def test_torch_has_moved_no_private_name() -> None:
    assert moved(torch_private.NAMES) == []
    assert moved({"torch._utils": "gone", "torch._gone": "x"}) == ["torch._utils.gone", "torch._gone.x"]


def test_a_class_is_known_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "torch.distributed.tensor._shards_wrapper"
    monkeypatch.delitem(torch_private.sys.modules, module, raising=False)
    assert not torch_private.is_a(1, "LocalShardsWrapper")
    monkeypatch.setitem(torch_private.sys.modules, module, SimpleNamespace(LocalShardsWrapper=int))
    assert torch_private.is_a(1, "LocalShardsWrapper")
