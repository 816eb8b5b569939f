"""Runs on a device that are killed and resumed, and the bits of two runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cuda.devices import ALL_SLOW
from tests.cuda.recorded import record
from tests.cuda.runs import DETERMINISTIC, FAMILIES, arguments, fast, ran
from tests.harness import curve, tensor_files


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("device", ALL_SLOW, indirect=True)
def test_a_killed_run_resumes_with_equal_bits(tmp_path: Path, device: torch.device, family: str) -> None:
    overrides = arguments(device, family, *fast(device), DETERMINISTIC, "checkpoint.max_checkpoint_keep=1")  # 4.6 GB
    ran(tmp_path / "unbroken", overrides, device)
    killed = ran(tmp_path / "killed", overrides, device, kill_after=6, saved=4)
    assert killed.statuses == (-9,)
    resumed = ran(tmp_path / "killed", overrides, device)
    assert "iteration 4" in resumed.text
    assert curve(tmp_path / "killed") == curve(tmp_path / "unbroken")
    last = "checkpoints/iter_0000008"
    assert tensor_files(tmp_path / "killed" / last) == tensor_files(tmp_path / "unbroken" / last)


@pytest.mark.cuda
def test_bits_without_the_flag_are_recorded(tmp_path: Path) -> None:
    """Nothing is promised without `train.deterministic=true`; what a device does goes into the record."""
    device = torch.device("cuda")
    overrides = arguments(device, "gpt2", *fast(device), "checkpoint.save=null")
    for name in ("one", "two"):
        ran(tmp_path / name, overrides, device)
    pairs = zip(curve(tmp_path / "one"), curve(tmp_path / "two"), strict=True)
    differing = [one[0] for one, two in pairs if one != two]
    record(
        "bits of two runs without train.deterministic",
        f"differ from iteration {differing[0]}" if differing else "equal",
    )
