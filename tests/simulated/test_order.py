"""The simulated device keeps the order of its streams, and no other: a test on it that lacks a wait fails."""

from __future__ import annotations

import pytest
import torch

from tests.cuda.devices import IS_SIMULATED, SIMULATED
from tests.simulated import register

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.skipif(not IS_SIMULATED, reason="needs the simulated device, as test_simulated_device.py has it"),
]


@pytest.fixture
def device() -> torch.device:
    return torch.device(SIMULATED, 2)


def pinned(*size: int) -> torch.Tensor:
    return torch.zeros(*size, pin_memory=True)


def test_a_copy_in_the_background_ends_later(device: torch.device) -> None:
    source, target = torch.ones(100, device=device), pinned(100)
    stream = torch.accelerator.current_stream(device)
    with register.held(stream):
        target.copy_(source, non_blocking=True)
        event = stream.record_event()
        assert not event.query()
        assert int(target.count_nonzero()) == 0
    event.synchronize()
    assert int(target.count_nonzero()) == 100


def test_a_stream_does_not_wait_for_another_by_itself(device: torch.device) -> None:
    module, current, found = torch.get_device_module(device), torch.accelerator.current_stream(device), []
    for waits in (False, True):
        source, target, other = torch.zeros(100, device=device), pinned(100), module.Stream(device)
        with register.held(current):
            source.add_(1.0)
            if waits:
                other.wait_stream(current)
            with module.stream(other):
                target.copy_(source, non_blocking=True)
            if not waits:
                other.synchronize()
        other.synchronize()
        found.append(int(target.count_nonzero()))
    assert found == [0, 100]


def test_freed_memory_has_other_bytes_where_nobody_holds_it(device: torch.device) -> None:
    module, found = torch.get_device_module(device), []
    for is_recorded in (False, True):
        source, target, other = torch.ones(100, device=device), pinned(100), module.Stream(device)
        with register.held(other):
            with module.stream(other):
                target.copy_(source, non_blocking=True)
            if is_recorded:
                source.record_stream(other)
            del source
            torch.zeros(1, device=device)
            torch.accelerator.current_stream(device).synchronize()
        other.synchronize()
        found.append(float(target.sum()))
    assert found[0] != 100.0
    assert found[1] == 100.0
