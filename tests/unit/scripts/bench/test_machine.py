"""The machine of a measurement: its memory, and the tools of its compiler."""

from __future__ import annotations

from pathlib import Path
from subprocess import CalledProcessError

import pytest
import torch

from scripts.bench import machine


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (RuntimeError("\nFailed to find C compiler.\nmore"), "RuntimeError: Failed to find C compiler."),
        (CalledProcessError(1, ["gcc"]), "CalledProcessError: Command '['gcc']' returned non-zero exit status 1."),
    ],
    ids=["absent", "fails"],
)
def test_a_missing_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch, error: Exception, shown: str) -> None:
    def fail(function: object) -> object:
        raise error

    monkeypatch.setattr(torch, "compile", fail)
    assert machine.compile_error(torch.device("cpu")) == shown


def test_the_memory_of_a_container_counts(tmp_path: Path) -> None:
    limits = tmp_path / "none", tmp_path / "unlimited", tmp_path / "limited"
    whole = machine.host_bytes(())
    limits[1].write_text("max\n")
    assert machine.host_bytes(limits[:2]) == whole > 0
    limits[2].write_text("123456\n")
    assert machine.host_bytes(limits) == 123456
