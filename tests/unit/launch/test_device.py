"""The choice of a device, among accelerators that are made up."""

from __future__ import annotations

import pytest
import torch

from reprise.errors import LaunchError
from tests.messages import refused
from trainer.launch.device import choose_device, device_name


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two devices of XPU; the indices that are set as the current one."""
    indices: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", indices.append)
    return indices


@pytest.mark.parametrize("name", ["auto", "xpu"])
def test_a_rank_takes_the_accelerator_of_its_number(chosen: list[int], name: str) -> None:
    assert choose_device(name, 1) == torch.device("xpu", 1)
    assert chosen == [1]


def test_the_cpu_is_taken_where_it_is_asked_for(chosen: list[int]) -> None:
    assert choose_device("cpu", 1) == torch.device("cpu")
    assert chosen == []


@pytest.mark.parametrize(("name", "rank", "found"), [("xpu", 2, 2), ("cuda", 0, 0)])
def test_a_rank_without_a_device_is_refused(chosen: list[int], name: str, rank: int, found: int) -> None:
    with refused(LaunchError, name.upper(), f"at least {rank + 1}", f"found {found}"):
        choose_device(name, rank)


@pytest.mark.parametrize("kind", [None, "mps"])
def test_auto_is_the_cpu_without_a_known_accelerator(monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind or "cpu"))
    assert choose_device("auto", 0) == torch.device("cpu")
    assert device_name(torch.device("cpu")) == "cpu"
