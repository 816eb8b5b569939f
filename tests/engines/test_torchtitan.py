"""A checkpoint manager of torchtitan with Reprise: what its settings say, and the position in the data."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from reprise.errors import ConfigError
from tests.engines.programs import needs

pytestmark = needs("torchtitan", "torchdata")


class Numbers(IterableDataset[int]):
    """The numbers from 0 on, with a position."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Any:
        while True:
            self.next += 1
            yield self.next - 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def parts(**settings: Any) -> tuple[Any, Any, Any]:
    """Return a manager, the weights of its model, and its loader."""
    program = importlib.import_module("examples.torchtitan_parts")
    loader = importlib.import_module("torchtitan.components.dataloader").ParallelAwareDataloader(Numbers(), 0, 1)
    model: list[nn.Module] = [nn.Linear(2, 1)]
    adam = program.ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})
    optimizers = program.OptimizersContainer.Config(param_groups=[adam], implementation="for-loop").build(
        model_parts=model
    )
    schedules = program.LRSchedulersContainer.Config(warmup_steps=0).build(optimizers=optimizers, training_steps=9)
    given: Any = {"dataloader": loader, "model_parts": model, "optimizers": optimizers, "lr_schedulers": schedules}
    config = program.CheckpointManager.Config(**{"enable": True, "interval": 4, "keep_latest_k": 0, **settings})
    return config.build(**given, states={}, sd_adapter=None), model[0].weight, loader


def test_the_settings_say_what_is_saved_and_loaded(tmp_path: Path) -> None:
    manager, weight, loader = parts(folder=str(tmp_path), enable_first_step_checkpoint=True)
    assert not manager.load()
    numbers = iter(loader)
    saved = {}
    for step in range(1, 8):
        next(numbers)
        with torch.no_grad():
            weight.fill_(step)
        saved[step] = manager.save(step, last_step=step == 7)
    manager.close()
    assert [step for step, is_saved in saved.items() if is_saved] == [1, 4, 7]

    for settings, step, expected in (
        ({}, -1, (7, 7)),
        ({}, 4, (4, 4)),
        ({"exclude_from_loading": ["dataloader"]}, 4, (4, 0)),
        ({"load_only": True}, 1, (1, 1)),
    ):
        manager, weight, loader = parts(folder=str(tmp_path), **settings)
        assert manager.load(step)
        assert (int(weight[0, 0]), int(next(iter(loader)))) == expected
        assert manager.save(8) is not settings.get("load_only", False)
        manager.close()
    assert not parts(folder=str(tmp_path), enable=False)[0].load()


@pytest.mark.parametrize(
    "settings",
    [{"initial_load_path": "/weights"}, {"initial_load_in_hf": True}, {"last_save_in_hf": True}],
    ids=lambda settings: next(iter(settings)),
)
def test_files_of_others_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="needs torchtitan's own manager"):
        parts(**settings)
