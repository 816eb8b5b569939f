"""Token files that are cut while a run reads them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.crash.moments import standing
from tests.harness import TINY, curve, run_ok
from trainer.data.token_file import write_token_file

pytestmark = pytest.mark.slow

TOKENS = 4000


def write(folder: Path, name: str, tokens: np.ndarray) -> None:
    folder.mkdir(exist_ok=True)
    write_token_file(folder / name, [tokens], dtype=np.uint16)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder of two training files and one for validation."""
    tokens = np.random.default_rng(3).integers(0, 256, (3, TOKENS))
    for number, name in enumerate(("train_0.bin", "train_1.bin", "valid.bin")):
        write(tmp_path / "data", name, tokens[number])
    return tmp_path / "data"


def overrides(data: Path, iterations: int) -> list[str]:
    return [
        "model=gpt2_tiny",
        *TINY,
        "data=token_file",
        f"data.train={data}/train_*.bin",
        f"data.valid={data}/valid.bin",
        f"data.cache={data}/../cache",
        "train.eval_interval=2",
        "train.eval_iters=1",
        f"train.train_iters={iterations}",
        "schedule.lr_decay_iters=9",
        "checkpoint.save_interval=2",
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_token_file_that_is_cut_ends_all_ranks_with_its_name_and_sizes(
    data: Path, tmp_path: Path, ranks: int
) -> None:
    run, given = tmp_path / "run", overrides(data, 9)
    path = data / "train_0.bin"
    size = path.stat().st_size
    kept = data.with_name("kept")
    shutil.copytree(data, kept)
    with standing(run, given, moment="step", iteration=3, ranks=ranks) as (running, gate):
        gate.await_reached()
        for found in data.glob("train_*.bin"):
            os.truncate(found, 0)
        gate.open()
        running.join(60.0)
    ended = running.ended()
    assert ended.statuses == (1,) * ranks, ended.text
    assert "cut while it was in use" in ended.text
    assert f"expected {size} bytes, found 0 bytes" in ended.text
    for name in ("train_0.bin", "train_1.bin"):
        shutil.copy(kept / name, data / name)
    run_ok(run, given, ranks=ranks)
    run_ok(tmp_path / "whole", given, ranks=ranks)
    assert curve(run) == curve(tmp_path / "whole")
