"""The state of accelerate by Reprise: all that was prepared or registered."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reprise import load, save
from reprise.errors import MismatchError
from tests.messages import refused

accelerate = pytest.importorskip("accelerate", exc_type=ImportError)


class Count:
    """An object of a program's own."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def start(value: int) -> tuple[Any, list[Any]]:
    """Return an accelerator with two models whose weights, rates and further state are one number, and these."""
    accelerator = accelerate.Accelerator(cpu=True)
    models: list[Any] = [nn.Linear(1, 1), nn.Linear(1, 1)]
    for model in models:
        nn.init.constant_(model.weight, value)
    optimizers: list[Any] = [torch.optim.SGD(model.parameters(), lr=float(value)) for model in models]
    schedule: Any = torch.optim.lr_scheduler.ConstantLR(optimizers[0], factor=1.0)
    schedule.last_epoch = value
    count = Count(value)
    accelerator.prepare(*models, *optimizers, schedule)
    accelerator.register_for_checkpointing(count)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=float(value))
    return accelerator, [*models, *optimizers, schedule, count]


def values(accelerator: Any, parts: list[Any]) -> list[float]:
    first, second, *optimizers, schedule, count = parts
    weights = [first.weight.item(), second.weight.item()]
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    return [*weights, *rates, schedule.last_epoch, count.value, accelerator.scaler.get_scale()]


def test_all_that_is_prepared_or_registered_comes_back(tmp_path: Path) -> None:
    parts_of = importlib.import_module("examples.accelerate_loop").parts_of
    accelerator, _ = start(1)
    save(tmp_path, **parts_of(accelerator), iteration=8, rng=True)
    accelerator, parts = start(2)
    assert load(tmp_path, **parts_of(accelerator), rng="if_same_ranks")["iteration"] == 8
    assert values(accelerator, parts) == [1] * 7


def test_a_scaler_that_was_not_saved_changes_nothing(tmp_path: Path) -> None:
    parts_of = importlib.import_module("examples.accelerate_loop").parts_of
    accelerator, _ = start(1)
    accelerator.scaler = None
    save(tmp_path, **parts_of(accelerator), iteration=8)
    accelerator, parts = start(2)
    with refused(MismatchError, "/scaler is missing"):
        load(tmp_path, **parts_of(accelerator))
    assert values(accelerator, parts) == [2] * 7
