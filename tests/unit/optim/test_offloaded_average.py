"""Moving averages on the host: their bits, and what the next step does with a move that failed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.optim.average import finish_move, keep_average
from trainer.optim.offloaded_average import keep_average_on_host

DECAY = 0.999


def build(keep: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of odd sizes, and an optimizer that has stepped once and then begun an average."""
    torch.manual_seed(0)
    model = nn.Linear(301, 307)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer)
    keep(optimizer, model, DECAY, {})  # type: ignore[operator]
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.3).mul_(parameter.detach())
    optimizer.step()


def test_a_thread_moves_them_with_the_same_bits() -> None:
    (model_a, a), (model_b, b) = build(keep_average), build(keep_average_on_host)
    for _ in range(20):
        step(model_a, a)
        step(model_b, b)
    finish_move(b)
    for parameter, other in zip(model_a.parameters(), model_b.parameters(), strict=True):
        assert torch.equal(a.state[parameter]["ema"], b.state[other]["ema"])
        assert a.state[parameter]["ema"].count_nonzero()


def test_a_failed_move_ends_the_next_step() -> None:
    model, optimizer = build(keep_average_on_host)
    weight = next(model.parameters())
    optimizer.state[weight]["ema"] = torch.zeros(weight.numel() + 1)
    step(model, optimizer)
    before = weight.detach().clone()
    with pytest.raises(RuntimeError, match="size"):
        step(model, optimizer)
    assert torch.equal(weight, before)
