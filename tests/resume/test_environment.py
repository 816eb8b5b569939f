"""A resume on another processor says that the curve equals within rounding, and why. Torch's kernels stand for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reprise.format import STATE
from scripts.faults.ranks import free_port
from tests.harness import DEADLINE_S, TINY, checkpoint, curve, rank_variables, run_ok
from tests.resume.starts import REFERENCE

# The kernels that torch has for any processor: a process takes them for good as it starts.
ELSEWHERE = {"ATEN_CPU_CAPABILITY": "default"}
HERE = torch.backends.cpu.get_cpu_capability()
BASE = ["model=gpt2_tiny", *TINY, "train.threads=1", "parallel.invariant_ranks=2", "schedule.lr_decay_iters=20"]
ROUNDING = "weights and moments stay bitwise, the loss curve equals within rounding"

pytestmark = pytest.mark.skipif(HERE == "DEFAULT", reason="needs a processor with kernels of its own")


def launch(folder: Path, *overrides: str, variables: list[dict[str, str]]) -> list[str]:
    """Train on a rank for each member of `variables`, with them in its environment; return the lines of the ranks."""
    command = [sys.executable, "-m", "trainer", f"run.dir={folder}", *overrides]
    port, ranks = free_port(), list[subprocess.Popen[str]]()
    try:
        for rank, own in enumerate(variables):
            environment = os.environ | rank_variables(rank, len(variables), port=port) | own
            ranks.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        texts = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert not any(rank.returncode for rank in ranks), texts
    return "".join(texts).splitlines()


def kernels(run: Path, number: int) -> object:
    return json.loads((checkpoint(run, number) / STATE).read_text())["environment"]["math"]["kernels"]


def test_another_processor_is_said_with_its_cause(run: Path) -> None:
    moved = launch(run, *REFERENCE, "train.train_iters=9", variables=[ELSEWHERE])
    cause = f"environment.math.kernels: saved {HERE}, now DEFAULT; {ROUNDING}"
    assert any(line.startswith(cause) for line in moved)
    assert kernels(run, 9) == "DEFAULT"


@pytest.mark.slow
def test_ranks_on_different_processors_are_said_and_recorded(tmp_path: Path) -> None:
    run = tmp_path / "run"
    lines = launch(run, *BASE, "train.train_iters=3", variables=[{}, ELSEWHERE])
    assert f"environment.math.kernels: {HERE} on rank 0, DEFAULT on rank 1" in lines
    assert any("parallel.invariant_ranks" in line for line in lines)
    assert kernels(run, 3) == [HERE, "DEFAULT"]
    moved = run_ok(run, [*BASE, "train.train_iters=4", "checkpoint.reshard=true"]).text.splitlines()
    assert f"topology.dp: saved 2, now 1; {ROUNDING}" in moved
    assert any(line.startswith("environment.math.kernels: saved [") for line in moved)


@pytest.mark.slow
def test_another_processor_computes_other_losses(reference: Path, tmp_path: Path) -> None:
    launch(tmp_path / "elsewhere", *REFERENCE, "train.exit_interval=3", variables=[ELSEWHERE])
    assert curve(tmp_path / "elsewhere") != curve(reference)[:3]
