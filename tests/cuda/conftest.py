"""Chooses the device of a test: the CPU with small sizes, in the gate, and a CUDA device with real ones."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from tests.cuda import recorded

_START, _MOST_S = time.monotonic(), 450.0


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Yield the device; what a test left in its memory is freed afterwards."""
    found = torch.device(request.param)
    yield found
    if found.type == "cuda":
        torch.cuda.empty_cache()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out the rest of the tests of a device after a while: a lent machine is taken back."""
    if item.get_closest_marker("cuda") and time.monotonic() - _START > _MOST_S:
        pytest.skip(f"left out: the tests of a device end after {_MOST_S:.0f} s")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of a CUDA device where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is false"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was recorded."""
    for line in recorded.write():
        terminalreporter.write_line(line)
