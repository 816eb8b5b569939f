"""The installed torch has every private name where the project looks for it."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest

from reprise import torch_private


@pytest.mark.parametrize("module", torch_private.NAMES)
def test_torch_has_moved_no_private_name(module: str) -> None:
    assert [name for name in torch_private.NAMES[module].split() if not hasattr(import_module(module), name)] == []


def test_a_class_is_known_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "torch.distributed.tensor._shards_wrapper"
    monkeypatch.delitem(torch_private.sys.modules, module, raising=False)
    assert not torch_private.is_a(1, "LocalShardsWrapper")
    monkeypatch.setitem(torch_private.sys.modules, module, SimpleNamespace(LocalShardsWrapper=int))
    assert torch_private.is_a(1, "LocalShardsWrapper")
