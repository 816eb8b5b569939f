"""A run whose caller has closed its standard streams trains and saves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import DEADLINE_S, TINY, all_files, curve
from trainer.config.options import CONFIGS

ARGUMENTS = ("run.dir=run", "model=gpt2_tiny", *TINY, "train.train_iters=2", "schedule.lr_warmup_iters=1")


def run(folder: Path, closing: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in `folder` with the redirections of a shell, as `>&-`."""
    command = [sys.executable, "-m", "trainer", *ARGUMENTS, *arguments]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {closing}', "sh", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(CONFIGS.parent)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.mark.parametrize("closing", [">&-", *(pytest.param(c, marks=pytest.mark.slow) for c in ("2>&-", ">&- 2>&-"))])
def test_a_run_with_closed_streams_trains_and_writes_its_files(tmp_path: Path, closing: str) -> None:
    ended = run(tmp_path, closing)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [row[0] for row in curve(tmp_path / "run")] == [1, 2]
    # No file of the run was opened in the place of a closed stream, where prints would have gone into it.
    assert all(b"train loss" not in data for data in all_files(tmp_path / "run").values())
    if "2>&-" in closing:
        ended = run(tmp_path, closing, "model.n_layer=1")
        assert ended.returncode == 1
        assert ("MismatchError: " in ended.stdout) == (closing == "2>&-")


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
