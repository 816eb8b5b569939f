"""States that tests save and load: a model with parts of many kinds, and what differs between two states."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    """A user's module: buffers, a tied weight, a frozen parameter, one that is not contiguous."""

    embed: nn.Embedding
    norm: nn.BatchNorm1d
    frozen: nn.Parameter
    odd: nn.Parameter
    head: nn.Linear

    def __init__(self, order: tuple[str, ...] = ("embed", "norm", "frozen", "odd")) -> None:
        super().__init__()
        parts: dict[str, nn.Module | nn.Parameter] = {
            "embed": nn.Embedding(11, 8),
            "norm": nn.BatchNorm1d(8),
            "frozen": nn.Parameter(torch.randn(8), requires_grad=False),
            "odd": nn.Parameter(torch.randn(8, 5).T),
        }
        for name in order:
            setattr(self, name, parts[name])
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(ids)) + self.frozen
        loss: torch.Tensor = self.head(hidden).square().mean() + (hidden @ self.odd.T).square().mean()
        return loss


def groups(model: nn.Module, *, reverse: bool = False) -> list[dict[str, object]]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in named if name in ("odd", "embed.weight")]
    others = [p for name, p in named if name not in ("odd", "embed.weight")]
    if reverse:
        return [{"params": others[::-1]}, {"params": decayed[::-1]}]
    return [{"params": decayed, "weight_decay": 0.1, "lr": 0.02}, {"params": others, "weight_decay": 0.0}]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        ids = torch.randint(0, 11, (6,), generator=torch.Generator().manual_seed(step))
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(steps: int = 2) -> tuple[Net, torch.optim.Optimizer]:
    """Return a model and its optimizer after some steps."""
    net = Net()
    optimizer = torch.optim.AdamW(groups(net), lr=0.01)
    train(net, optimizer, steps)
    return net, optimizer


def assert_same(expected: Any, value: Any) -> None:
    """Compare two states: their values, bits, types, and the order of their keys."""
    problems = differences(expected, value, "")
    assert not problems, problems


def assert_same_optimizer(expected: torch.optim.Optimizer, value: torch.optim.Optimizer) -> None:
    """Compare two optimizers of the same parameters; state may be in any order."""
    first, second = expected.state_dict(), value.state_dict()
    for state in (first, second):
        state["state"] = {key: sorted(values.items()) for key, values in sorted(state["state"].items())}
    assert_same(first, second)


def differences(expected: Any, value: Any, where: str) -> list[str]:
    """Return where two states differ in value, type or order."""
    if isinstance(expected, torch.Tensor) and isinstance(value, torch.Tensor):
        alike = expected.dtype == value.dtype and expected.shape == value.shape and _bits(expected) == _bits(value)
        return [] if alike else [f"{where}: expected {expected!r}, found {value!r}".replace("\n", " ")[:300]]
    if type(expected) is not type(value):
        return [f"{where}: expected {expected!r} ({type(expected).__name__}), found {value!r}"[:400]]
    if isinstance(expected, dict):
        if list(expected) != list(value) or list(map(type, expected)) != list(map(type, value)):
            return [f"{where}: expected keys {list(expected)}, found {list(value)}"[:400]]
        return [text for key in expected for text in differences(expected[key], value[key], f"{where}/{key}")]
    if isinstance(expected, list | tuple) and len(expected) == len(value):
        pairs = enumerate(zip(expected, value, strict=True))
        return [text for number, pair in pairs for text in differences(*pair, f"{where}/{number}")]
    if isinstance(expected, float):
        return [] if struct.pack("d", expected) == struct.pack("d", value) else [f"{where}: {expected} became {value}"]
    if isinstance(expected, np.ndarray):
        return [] if np.array_equal(expected, value) and expected.dtype == value.dtype else [f"{where}: an array"]
    return [] if expected == value else [f"{where}: expected {expected!r}, found {value!r}"[:400]]


def _bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a dense tensor."""
    plain = torch.empty(tensor.numel(), dtype=tensor.dtype)  # with a stride of 1, whatever that of the tensor is
    plain.copy_(tensor.detach().reshape(-1))
    return bytes(plain.view(torch.uint8).tolist())


class Holding:
    """An object whose state is a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["t"]
