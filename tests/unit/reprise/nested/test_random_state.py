"""`rng=True` and `RandomState`: a loop goes on with the draws that it would have made."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from reprise import AsyncSaver, load, save, save_state_dict
from reprise.errors import CheckpointError, ConfigError, MismatchError
from reprise.nested.random_state import RandomState
from tests.messages import refused


@pytest.fixture(autouse=True)
def own_generators() -> Iterator[None]:
    kept = RandomState().state_dict()
    yield
    RandomState().load_state_dict(kept)


def draws() -> list[float]:
    """Draw from every generator, from those of normal numbers an odd count, so that they keep one for later."""
    numbers = [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]
    return [*numbers, torch.rand(()).item(), *torch.randn(3).tolist()]


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def test_a_load_restores_every_generator(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    seed(1)
    draws()
    with AsyncSaver(tmp_path) as saver:
        saver.save(1, model, rng=True)
        expected = [draws(), draws()]
    seed(2)
    assert load(tmp_path, model, rng=True) == {"iteration": 1}
    assert [draws(), draws()] == expected


def test_a_damaged_save_of_other_ranks_leaves_the_older_state(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path, model, iteration=1, rng=True)
    expected = draws()
    own = {str(rank): {"rng": RandomState()} for rank in range(2)}
    newer = save_state_dict(tmp_path, {"model": model.state_dict(), "per_rank": own}, iteration=2)
    path = next(newer.glob("model*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert load(tmp_path, model, rng="if_same_ranks") == {"iteration": 1}
    assert draws() == expected


def test_a_slip_in_the_value_of_rng_is_refused(tmp_path: Path) -> None:
    with refused(ConfigError, "if_same_ranks"):
        load(tmp_path, nn.Linear(2, 2), rng="if_same_rank", missing_ok=True)


def test_a_key_for_the_random_state_is_refused(tmp_path: Path) -> None:
    with refused(CheckpointError, "`per_rank`", "rng"):
        save(tmp_path, nn.Linear(2, 2), iteration=1, rng=True, per_rank={"rng": 3})


class Device:
    """The module of an accelerator with two devices."""

    def __init__(self) -> None:
        self.states = {f"cuda:{index}": torch.full((16,), index, dtype=torch.uint8) for index in range(2)}
        self.is_used = True

    def is_initialized(self) -> bool:
        return self.is_used

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.states[str(device)].clone()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.states[str(device)] = state


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    module = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    accelerator = SimpleNamespace(
        current_accelerator=lambda: torch.device("cuda"), device_count=lambda: len(module.states)
    )
    monkeypatch.setattr(torch, "accelerator", accelerator)
    return module


def test_devices_in_use_have_their_state_carried(device: Device) -> None:
    state: dict[str, Any] = RandomState().state_dict()
    device.states = {name: torch.zeros(16, dtype=torch.uint8) for name in device.states}
    RandomState().load_state_dict(state)
    assert [value[0].item() for value in device.states.values()] == [0, 1]
    del device.states["cuda:1"]
    seed(4)
    expected = draws()
    seed(4)
    with refused(MismatchError, "cuda:1"):
        RandomState().load_state_dict(state)
    assert draws() == expected


def test_a_device_that_is_not_in_use_is_left_alone(device: Device) -> None:
    device.is_used = False
    assert list(RandomState().state_dict()) == ["python", "numpy", "cpu"]
