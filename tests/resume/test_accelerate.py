"""The state of accelerate by Reprise: all that was prepared or registered, and the names that it takes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reprise.errors import ConfigError, TrainerError
from tests.messages import refused

pytest.importorskip("accelerate", exc_type=ImportError)


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
    accelerator = importlib.import_module("examples.accelerate_loop").Accelerator(
        cpu=True, gradient_accumulation_steps=4
    )
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
    accelerator.step = value
    return accelerator, [*models, *optimizers, schedule, count]


def values(accelerator: Any, parts: list[Any]) -> list[float]:
    first, second, *optimizers, schedule, count = parts
    weights = [first.weight.item(), second.weight.item()]
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    return [*weights, *rates, schedule.last_epoch, count.value, accelerator.scaler.get_scale(), accelerator.step]


def test_all_that_is_prepared_or_registered_comes_back(tmp_path: Path) -> None:
    accelerator, parts = start(1)
    assert accelerator.load_state(tmp_path / "run_2") == 0
    assert accelerator.save_state(tmp_path / "run_2" / "checkpoint-8") == str(tmp_path / "run_2" / "iter_0000008")
    accelerator, parts = start(3)
    accelerator.save_state(tmp_path / "run_2" / "step_9")
    accelerator.end_training()
    for name, iteration, value in (("", 9, 3), ("iter_0000008", 8, 1), ("epoch_9", 9, 3)):
        accelerator, parts = start(2)
        assert accelerator.load_state(tmp_path / "run_2" / name) == iteration
        assert values(accelerator, parts) == [value] * 8
    for folder in ("run_2", "empty"):
        with pytest.raises(TrainerError):
            accelerator.load_state(tmp_path / folder / "step_7")


def test_a_save_without_an_iteration_or_with_a_hook_is_refused(tmp_path: Path) -> None:
    accelerator, _ = start(1)
    with refused(ConfigError, "step_40"):
        accelerator.save_state(tmp_path / "final")
    accelerator.register_save_state_pre_hook(print)
    with refused(ConfigError, "a hook of register_save_state_pre_hook"):
        accelerator.save_state(tmp_path / "step_1")
