"""Runs whose samples or masks depend on the index of their files: on any topology, and with another index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reprise.errors import TrainerError
from tests.harness import TINY, curve, run_ok
from tests.messages import refused
from tests.resume.random_tokens import state
from tests.resume.starts import start
from trainer.data.indexed_file import write_indexed_file

END = 256
RUN = [*TINY, "model=gpt2_tiny", "train.train_iters=4", "schedule.lr_decay_iters=9"]


def write_data(folder: Path, name: str, *, seed: int = 0, end: int = END) -> None:
    """Write documents of about 20 tokens; another `end` leaves the tokens as they are, and ends documents elsewhere."""
    rng = np.random.default_rng(seed)
    tokens = np.where(rng.random(3000) < 0.05, END, rng.integers(0, END, 3000))
    write_indexed_file(folder / f"{name}.bin", [tokens], dtype=np.dtype(np.uint16), end_of_text=end)


def losses(folder: Path) -> list[float]:
    return [float.fromhex(row[1]) for row in curve(folder)]


def data_of(run: Path) -> Any:
    return state(run, 4)["data"]


@pytest.mark.parametrize(
    "key", ["data.samples=per_document", pytest.param("data.document_mask=true", marks=pytest.mark.slow)]
)
def test_another_index_of_the_same_tokens_is_refused(tmp_path: Path, key: str) -> None:
    write_data(tmp_path, "a")
    run = [*RUN, "data=megatron", f"data.train={tmp_path}/a", key]
    run_ok(tmp_path / "run", [*run, "train.exit_interval=2"])
    write_data(tmp_path, "a", end=7)
    with refused(TrainerError, "data.documents  saved", "checkpoint.override_data=true") as caught:
        start(tmp_path / "run", *run)
    assert "data.train  saved" not in str(caught.value)
    run_ok(tmp_path / "run", [*run[:-1], "checkpoint.override_data=true"])  # nothing depends on the index then
    assert "documents" not in data_of(tmp_path / "run")


@pytest.mark.slow
def test_stages_train_documents_of_a_blend_as_one_rank(tmp_path: Path) -> None:
    for number, name in enumerate("abc"):
        write_data(tmp_path, name, seed=number)
    blend = f"data.train=[{{path: {tmp_path}/a, weight: 2}}, {{path: {tmp_path}/b, weight: 1/3}}]"
    run = [
        *RUN,
        "data=megatron",
        blend,
        f"data.valid={tmp_path}/c",
        "data.samples=per_document",
        "data.document_mask=true",
    ]
    run += ["train.batch_schedule=0:4 8:12", "train.eval_interval=2", "train.eval_iters=2"]
    run_ok(tmp_path / "one", run)
    run_ok(tmp_path / "two", [*run, "parallel.pipeline_model_parallel_size=2"], ranks=2)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert data_of(tmp_path / "one") == data_of(tmp_path / "two")
    assert state(tmp_path / "two", 4)["valid_loss"] == pytest.approx(state(tmp_path / "one", 4)["valid_loss"], rel=1e-5)
    for name in ("one", "two"):
        ranks = ["parallel.pipeline_model_parallel_size=2"] if name == "two" else []
        run_ok(tmp_path / f"stopped {name}", [*run, *ranks, "train.exit_interval=3"], ranks=len(ranks) + 1)
        run_ok(tmp_path / f"stopped {name}", [*run, *ranks], ranks=len(ranks) + 1)
        assert curve(tmp_path / f"stopped {name}") == curve(tmp_path / name)
