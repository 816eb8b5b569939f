"""Runs whose samples or masks depend on the index of their files: on any topology, and with another index."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.harness import TINY, curve, launch, run_ok
from trainer.data.indexed_file import write_indexed_file

END = 256
RUN = [*TINY, "model=gpt2_tiny", "train.train_iters=4", "schedule.lr_decay_iters=9"]


def write_data(folder: Path, name: str, *, seed: int = 0, end: int = END) -> None:
    """Write documents of about 20 tokens; another `end` leaves the tokens as they are, and ends documents elsewhere."""
    rng = np.random.default_rng(seed)
    tokens = np.where(rng.random(3000) < 0.05, END, rng.integers(0, END, 3000))
    write_indexed_file(folder / f"{name}.bin", [tokens], dtype=np.dtype(np.uint16), end_of_text=end)
    (folder / f"{name}.ds").write_bytes(tokens.astype("<u2").tobytes())
    ends = np.append(np.flatnonzero(tokens == end) + 1, tokens.size)
    (folder / f"{name}.ds.index").write_bytes(ends.astype("<u8").tobytes())


def losses(folder: Path) -> list[float]:
    return [float.fromhex(row[1]) for row in curve(folder)]


@pytest.mark.parametrize(
    ("files", "key"),
    [
        ("data=megatron data.train={}/a", "data.samples=per_document"),
        ("data=megatron data.train={}/a", "data.document_mask=true"),
        ("data=datatrove data.train={}/*.ds", "data.document_mask=true"),
    ],
)
def test_another_index_of_the_same_tokens_is_refused(tmp_path: Path, files: str, key: str) -> None:
    write_data(tmp_path, "a")
    run = [*RUN, *files.format(tmp_path).split(), key]
    run_ok(tmp_path / "run", [*run, "train.exit_interval=2"])
    write_data(tmp_path, "a", end=7)
    ended = launch(tmp_path / "run", run)
    assert not ended.ok
    assert "data.documents  saved" in ended.text
    assert "checkpoint.override_data=true" in ended.text
    assert "data.train: saved" not in ended.text
    plain = [*run[:-1], "checkpoint.override_data=true"]  # nothing depends on the index then
    run_ok(tmp_path / "run", plain)
    saved = json.loads((tmp_path / "run/checkpoints/iter_0000004/trainer_state.json").read_text())
    assert "documents" not in saved["data"]


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
    found = [json.loads((tmp_path / name / "checkpoints/iter_0000004/trainer_state.json").read_text())
             for name in ("one", "two")]  # fmt: skip
    assert found[0]["data"] == found[1]["data"]
    assert found[1]["valid_loss"] == pytest.approx(found[0]["valid_loss"], rel=1e-5)
    for name in ("one", "two"):
        ranks = ["parallel.pipeline_model_parallel_size=2"] if name == "two" else []
        run_ok(tmp_path / f"stopped {name}", [*run, *ranks, "train.exit_interval=3"], ranks=len(ranks) + 1)
        run_ok(tmp_path / f"stopped {name}", [*run, *ranks], ranks=len(ranks) + 1)
        assert curve(tmp_path / f"stopped {name}") == curve(tmp_path / name)
