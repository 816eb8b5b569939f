"""The machine of a measurement: its memory, and the tools of its compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripts.bench import machine


def test_a_missing_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: object) -> object:
        raise RuntimeError("\nFailed to find C compiler. Please specify via CC\nmore")

    monkeypatch.setattr(torch, "compile", fail)
    found = machine.compile_error(torch.device("cpu"))
    assert found == "RuntimeError: Failed to find C compiler. Please specify via CC"


def test_the_memory_of_a_container_counts(tmp_path: Path) -> None:
    limits = tmp_path / "none", tmp_path / "unlimited", tmp_path / "limited"
    whole = machine.host_bytes(())
    limits[1].write_text("max\n")
    assert machine.host_bytes(limits[:2]) == whole > 0
    limits[2].write_text("123456\n")
    assert machine.host_bytes(limits) == 123456
