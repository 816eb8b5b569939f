"""A resume on another processor says that the curve equals within rounding, and why. Torch's kernels stand for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reprise.folder import STATE
from scripts.faults.ranks import free_port, rank_variables
from tests.harness import TINY, curve, run_ok

# The kernels that torch has for any processor: a process takes them for good as it starts.
ELSEWHERE = {"ATEN_CPU_CAPABILITY": "default"}
HERE = torch.backends.cpu.get_cpu_capability()
BASE = ["model=gpt2_tiny", *TINY, "train.threads=1", "parallel.invariant_ranks=2", "schedule.lr_decay_iters=20"]
ROUNDING = "weights and moments stay bitwise, the loss curve equals within rounding"
TIMEOUT_S = 300.0

pytestmark = pytest.mark.skipif(HERE == "DEFAULT", reason="needs a processor with kernels of its own")


def launch(folder: Path, *overrides: str, variables: list[dict[str, str]]) -> str:
    """Train on a rank for each member of `variables`, with them in its environment; return what the ranks print."""
    command = [sys.executable, "-m", "trainer", f"run.dir={folder}", *BASE, *overrides]
    port, ranks = free_port(), list[subprocess.Popen[str]]()
    try:
        for rank, own in enumerate(variables):
            environment = os.environ | rank_variables(rank, len(variables), port=port) | own
            ranks.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        texts = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert not any(rank.returncode for rank in ranks), texts
    return "".join(texts)


def test_another_processor_is_said_with_its_cause(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_ok(run, [*BASE, "train.train_iters=3"])
    assert "now" not in run_ok(run, [*BASE, "train.train_iters=4"]).text.split("loaded")[0]
    moved = launch(run, "train.train_iters=5", variables=[ELSEWHERE])
    cause = f"environment.math.kernels: saved {HERE}, now DEFAULT; {ROUNDING}"
    assert f"{cause}: sums and products take the kernels of the processor" in moved.splitlines()
    state = json.loads((run / "checkpoints/iter_0000005" / STATE).read_text())
    assert state["environment"]["math"]["kernels"] == "DEFAULT"


def test_ranks_on_different_processors_are_said_and_recorded(tmp_path: Path) -> None:
    run = tmp_path / "run"
    text = launch(run, "train.train_iters=3", variables=[{}, ELSEWHERE])
    assert f"environment.math.kernels: {HERE} on rank 0, DEFAULT on rank 1" in text.splitlines()
    assert "parallel.invariant_ranks does not hold" in text
    state = json.loads((run / "checkpoints/iter_0000003" / STATE).read_text())
    assert state["environment"]["math"]["kernels"] == [HERE, "DEFAULT"]
    moved = run_ok(run, [*BASE, "train.train_iters=4", "checkpoint.reshard=true"]).text
    assert f"topology.dp: saved 2, now 1; {ROUNDING}" in moved.splitlines()
    assert re.search(r"^environment\.math\.kernels: saved \[.*\], now ", moved, re.MULTILINE)


@pytest.mark.slow
def test_another_processor_computes_other_losses(tmp_path: Path) -> None:
    run_ok(tmp_path / "here", [*BASE, "train.train_iters=3"])
    launch(tmp_path / "elsewhere", "train.train_iters=3", variables=[ELSEWHERE])
    assert curve(tmp_path / "elsewhere") != curve(tmp_path / "here")
