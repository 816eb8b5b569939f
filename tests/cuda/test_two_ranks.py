"""Two ranks of the trainer on one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cuda import one_device
from tests.cuda.devices import ALL_SLOW
from tests.cuda.recorded import record
from tests.cuda.runs import most_s, ran
from tests.harness import TINY, call_on_ranks, curve, tensor_files

LAYOUTS = {
    "zero3": "parallel.zero_stage=3",
    "tp2": "parallel.tensor_model_parallel_size=2",
    "pp2": "parallel.pipeline_model_parallel_size=2",
}
PLACES = [pytest.param(*each.values, layout, marks=each.marks) for each in ALL_SLOW for layout in LAYOUTS]


@pytest.mark.parametrize(("device", "layout"), PLACES, indirect=["device"])
def test_two_ranks_on_one_device_train_the_same_curve(tmp_path: Path, device: torch.device, layout: str) -> None:
    """Over gloo, since nccl refuses two ranks on one device; see the next test."""
    common = ["model=gpt2_tiny", *TINY, "train.train_iters=4", f"train.device={device.type}", "logging.log_interval=2"]
    ran(tmp_path / "one", common, device)
    ended = call_on_ranks(
        one_device.train,
        [f"run.dir={tmp_path / 'two'}", *common, LAYOUTS[layout]],
        folder=tmp_path / "ranks",
        ranks=2,
        timeout_s=most_s(device),
    )
    assert ended.ok, ended.text
    one, two = curve(tmp_path / "one"), curve(tmp_path / "two")
    losses = [[float.fromhex(row[1]) for row in rows] for rows in (one, two)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4 if device.type == "cuda" else 1e-5)
    # The checkpoint of two ranks opens on one, which writes the same bytes.
    source = tmp_path / "two/checkpoints/iter_0000004"
    ran(tmp_path / "again", [*common, f"checkpoint.load={source}", "checkpoint.reshard=true"], device)
    assert tensor_files(tmp_path / "again/checkpoints/iter_0000004") == tensor_files(source)


@pytest.mark.cuda
def test_nccl_refuses_two_ranks_on_one_device(tmp_path: Path) -> None:
    """The reason why the test above takes gloo; a release of nccl that does not refuse is recorded."""
    ended = call_on_ranks(
        one_device.train_over_nccl,
        [f"run.dir={tmp_path / 'run'}", "model=gpt2_tiny", *TINY, "train.train_iters=4", "train.device=cuda"],
        folder=tmp_path / "ranks",
        ranks=2,
        timeout_s=120.0,
    )
    record("two ranks on one device over nccl", "trained" if ended.ok else _reason(ended.text))
    assert ended.ok or "Duplicate GPU" in ended.text, ended.text


def _reason(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if "Duplicate GPU" in line), "another error")
