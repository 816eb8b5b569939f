"""Chooses the device of a test: the CPU with small sizes, in the gate, and a CUDA device with real ones."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cuda import recorded
from tests.cuda.devices import ALL, SIMULATED


@pytest.fixture(params=ALL)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return the device. The second simulated one becomes the current one of this thread, as a rank has it."""
    if request.param == SIMULATED:
        torch.accelerator.set_device_index(1)
        return torch.device(SIMULATED, 1)
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """Free the memory and the disk that a test of a device has taken: its checkpoints are of real sizes."""
    yield
    if request.node.get_closest_marker("cuda"):
        shutil.rmtree(tmp_path, ignore_errors=True)
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of a CUDA device where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is false"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was recorded."""
    for name, value in recorded.FOUND.items():
        terminalreporter.write_line(f"{name}: {value}")
