"""Checkpoints that the trainer cannot read now, or does not see: every rank ends, and nothing is renamed or lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from reprise.storage import Files, patience
from tests.crash.hosts import run_trainer
from tests.harness import TINY, all_files, call_on_ranks, curve, run_ok
from tests.profiles import nightly

pytestmark = pytest.mark.slow

BASE = ["model=gpt2_tiny", *TINY, "schedule.lr_decay_iters=20", "checkpoint.save_interval=2"]
LONGER = [*BASE, "train.train_iters=8"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of six iterations on two ranks, saved every two."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run_ok(folder, [*BASE, "train.train_iters=6"], ranks=2)
    return folder


def train_unreadable(arguments: list[str]) -> None:
    """Run the trainer's command where, on one rank, a kind of read fails for ever in folders of one name."""
    told = json.loads(arguments[0])
    patience.RETRY_S = 0.5
    if os.environ["RANK"] == str(told["rank"]):
        real = getattr(Files, told["kind"])

        def fail(self: Files, *given: Any, **keywords: Any) -> Any:
            path = Path(os.readlink(f"/proc/self/fd/{given[0]}")) if isinstance(given[0], int) else given[0]
            if "iter_0000006" in path.parts:
                raise OSError(told["code"], os.strerror(told["code"]), str(path))
            return real(self, *given, **keywords)

        setattr(Files, told["kind"], fail)
    run_trainer(arguments[1:])


@pytest.mark.parametrize(
    ("kind", "code", "rank"),
    [
        ("read", errno.EIO, 1),
        ("size", errno.ESTALE, 0),
        nightly("read", errno.EIO, 0),
        nightly("open_for_reading", errno.EACCES, 1),
    ],
)
def test_a_read_error_ends_the_start_on_all_ranks_the_next_works(
    finished: Path, tmp_path: Path, kind: str, code: int, rank: int
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    before = all_files(run)
    told = json.dumps({"kind": kind, "code": code, "rank": rank})
    ended = call_on_ranks(train_unreadable, [told, f"run.dir={run}", *LONGER], folder=run, ranks=2)
    assert ended.statuses == (1, 1), ended.text
    for output in ended.outputs:
        for word in (f"{os.strerror(code)} (errno {code})", "iter_0000006", "checkpoint.ckpt_step."):
            assert word in output
    assert {**all_files(run), "checkpoints/lock": b""} == {**before, "checkpoints/lock": b""}
    again = run_ok(run, LONGER, ranks=2)
    assert "iteration 6 from" in again.outputs[0]
    assert [row[0] for row in curve(run)] == list(range(1, 9))
