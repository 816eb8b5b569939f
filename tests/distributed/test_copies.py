"""Copies of a sharded state (`parallel.replicate`): losses, resumes and files are those of other topologies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.harness import TINY, curve, launch, run_ok, tensor_files

pytestmark = pytest.mark.slow

RUN = ["model=gpt2_tiny", *TINY, "train.train_iters=6", "train.micro_batch_size=1", "checkpoint.save_interval=3"]
COPIES = ["parallel.zero_stage=3", "parallel.replicate=2"]
LAST = "checkpoints/iter_0000006"


def losses(folder: Path) -> list[float]:
    return [float.fromhex(row[1]) for row in curve(folder)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of four ranks that hold two copies of the state."""
    folder = tmp_path_factory.mktemp("copies") / "run"
    run_ok(folder, [*RUN, *COPIES], ranks=4)
    return folder


def test_a_resume_has_the_bits_of_the_unbroken_run(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "again")
    run_ok(tmp_path / "again", [*RUN, *COPIES, "checkpoint.ckpt_step=3"], ranks=4)
    assert curve(tmp_path / "again") == curve(run)
    assert tensor_files(tmp_path / "again" / LAST) == tensor_files(run / LAST)


@pytest.mark.parametrize("ranks", [1, 2])
def test_other_ranks_continue_the_curve(run: Path, tmp_path: Path, ranks: int) -> None:
    shutil.copytree(run, tmp_path / "moved")
    moved = [*RUN, "parallel.zero_stage=2", "checkpoint.ckpt_step=3"]
    refused = launch(tmp_path / "moved", moved, ranks=ranks)
    assert not refused.ok
    assert "parallel.replicate   saved 2  current 1  (within rounding" in refused.text
    run_ok(tmp_path / "moved", [*moved, "checkpoint.reshard=true"], ranks=ranks)
    assert losses(tmp_path / "moved") == pytest.approx(losses(run), rel=1e-6)
    topologies = [
        json.loads((tmp_path / f"moved/checkpoints/iter_000000{step}/trainer_state.json").read_text())["topology"]
        for step in (3, 6)
    ]
    assert [topology.get("replicate") for topology in topologies] == [2, None]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "axis", ["parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2", "optimizer=muon"]
)
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_copies_combine_with_every_axis(tmp_path: Path, axis: str, zero_stage: int) -> None:
    ranks = 8 if axis.startswith("parallel") else 4
    stage = f"parallel.zero_stage={zero_stage}"
    run_ok(tmp_path / "many", [*RUN, axis, stage, "parallel.replicate=2", "train.global_batch_size=8"], ranks=ranks)
    optimizer = [axis] if ranks == 4 else []
    run_ok(tmp_path / "one", [*RUN, *optimizer, "train.global_batch_size=8"])
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
