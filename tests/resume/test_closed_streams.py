"""A run whose output nobody reads any more trains and saves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import DEADLINE_S, TINY, curve
from trainer.config.options import CONFIGS

ARGUMENTS = ("run.dir=run", "model=gpt2_tiny", *TINY, "train.train_iters=2", "schedule.lr_warmup_iters=1")


@pytest.mark.parametrize(
    "pipe", [pytest.param("", id="stdout"), pytest.param("2>&1", id="both", marks=pytest.mark.slow)]
)
def test_a_run_goes_on_once_nobody_reads_its_output(tmp_path: Path, pipe: str) -> None:
    script = f'{{ "$@"; echo $? > status; }} {pipe} | head -n 1'
    ended = subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, "-m", "trainer", *ARGUMENTS, "train.train_iters=4"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CONFIGS.parent)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (tmp_path / "status").read_text() == "0\n", ended.stderr
    assert len(ended.stderr.splitlines()) <= 1, ended.stderr
    assert [row[0] for row in curve(tmp_path / "run")] == [1, 2, 3, 4]
    assert (tmp_path / "run/checkpoints/iter_0000004/manifest.json").exists()
