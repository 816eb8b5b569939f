"""Traces of chosen iterations, whose bits they do not move."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pytest

from tests.harness import TINY, curve, run_ok
from trainer.metrics.profile import Profiler


@pytest.mark.slow
def test_each_rank_traces_the_iterations_and_no_bit_moves(tmp_path: Path) -> None:
    arguments = ["model=gpt2_tiny", *TINY, "train.train_iters=5", "checkpoint.save=null"]
    run_ok(tmp_path / "plain", arguments, ranks=2)
    ended = run_ok(tmp_path / "traced", [*arguments, "train.profile_steps=[2,3]"], ranks=2)
    assert curve(tmp_path / "traced") == curve(tmp_path / "plain")
    assert f"rank 0: trace of iterations 2 to 3: {tmp_path / 'traced/profile'}" in ended.outputs[0]
    for rank in range(2):
        path = tmp_path / f"traced/profile/iterations_2-3.rank{rank}.json.gz"
        names = [event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
        assert "aten::mm" in names or "aten::addmm" in names
        assert names.count("aten::_fused_adamw_") == 4  # two groups in two iterations


def test_a_run_that_ends_in_between_writes_its_trace(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, [2, 9], rank=3)
    for iteration in (1, 2, 3):
        with profiler.around(iteration):
            pass
    assert not (tmp_path / "profile").exists()
    profiler.close()
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["iterations_2-9.rank3.json.gz"]
    profiler.close()


def test_a_trace_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile").write_text("a file in the place of the folder")
    profiler = Profiler(tmp_path, [1, 1], rank=0)
    with profiler.around(1):
        pass
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert f"The trace cannot be written to {tmp_path / 'profile'}" in caplog.text
