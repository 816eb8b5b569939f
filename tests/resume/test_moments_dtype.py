"""Moments of another dtype than the command's are converted where a flag says so.

`test_refusals.py` has the refusal, and `test_invariant_ranks.py` the bits over kills and at other topologies.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tests.harness import TINY, checkpoint, run_ok
from tests.resume.test_averages import state

BASE = ("model=gpt2_tiny", *TINY, "train.ema_decay=0.9", "schedule.lr_decay_iters=9", "train.train_iters=4")
KEY, FLAG = "optimizer.moments_dtype", "checkpoint.override_dtype=true"


def test_moments_of_another_dtype_are_converted(tmp_path: Path) -> None:
    run_ok(tmp_path / "float32", BASE)
    load = f"checkpoint.load={checkpoint(tmp_path / 'float32', 4)}"
    moved = [*BASE, f"{KEY}=bfloat16", load, "parallel=zero3", "checkpoint.reshard=true"]
    converted = run_ok(tmp_path / "bfloat16", [*moved, FLAG], ranks=2)
    assert f"{KEY}: saved float32, now bfloat16; loaded moments are converted" in converted.text
    exact, rounded = state(tmp_path / "float32", 4), state(tmp_path / "bfloat16", 4)
    moments = {name for name in exact if name.startswith("exp_avg")}
    assert {name for name, value in rounded.items() if value.dtype is torch.bfloat16} == moments
    assert all(torch.equal(rounded[n], v.bfloat16() if n in moments else v) for n, v in exact.items())
    load = f"checkpoint.load={checkpoint(tmp_path / 'bfloat16', 4)}"
    run_ok(tmp_path / "wide", [*BASE, load, FLAG, "checkpoint.reshard=true"])
    assert all(torch.equal(value, rounded[name].float()) for name, value in state(tmp_path / "wide", 4).items())
