"""The installed torch has every private name where the project looks for it."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from reprise import torch_private


@pytest.mark.parametrize("module", torch_private.NAMES)
def test_torch_has_moved_no_private_name(module: str) -> None:
    assert [name for name in torch_private.NAMES[module].split() if not hasattr(import_module(module), name)] == []


@pytest.mark.parametrize("owner", torch_private.MEMBERS)
def test_torch_has_removed_no_private_member(owner: str) -> None:
    place, _, name = owner.rpartition(".")
    holder = torch if owner == "torch" else getattr(import_module(place), name)
    holder = holder() if holder is torch.nn.Module else holder  # instances have its hooks
    known = {*dir(holder), *getattr(holder, "__annotations__", ())}
    assert {*torch_private.MEMBERS[owner].split()} <= known
