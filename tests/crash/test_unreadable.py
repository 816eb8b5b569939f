"""Checkpoints that the trainer cannot read now, or does not see: every rank ends, and nothing is renamed or lost."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trainer.__main__
from reprise.files import Files
from reprise.storage import patience
from tests.harness import TINY, all_files, call_on_ranks, curve, run_ok

pytestmark = pytest.mark.slow

BASE = ["model=gpt2_tiny", *TINY, "schedule.lr_decay_iters=20", "checkpoint.save_interval=2"]
_CLONE_NEWNS = 0x00020000  # linux/sched.h
RETRY_S = 0.5


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of six iterations on two ranks, saved every two."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run_ok(folder, [*BASE, "train.train_iters=6"], ranks=2)
    return folder


def train_unreadable(arguments: list[str]) -> None:
    """Run the trainer's command where, on one rank, a kind of read fails for ever in folders of one name."""
    told = json.loads(arguments[0])
    patience.RETRY_S = RETRY_S
    if int(os.environ.get("RANK", "0")) == told["rank"]:
        real = getattr(Files, told["kind"])

        def fail(self: Files, *given: Any, **keywords: Any) -> Any:
            path = Path(os.readlink(f"/proc/self/fd/{given[0]}")) if isinstance(given[0], int) else given[0]
            if told["name"] in path.parts:
                raise OSError(told["code"], os.strerror(told["code"]), str(path))
            return real(self, *given, **keywords)

        setattr(Files, told["kind"], fail)
    sys.argv = ["trainer", *arguments[1:]]
    trainer.__main__.main()


@pytest.mark.parametrize(
    ("kind", "code", "rank"),
    [("read", errno.EIO, 0), ("read", errno.EIO, 1), ("open_for_reading", errno.EACCES, 1), ("size", errno.ESTALE, 0)],
)
def test_a_read_error_ends_the_start_on_all_ranks_the_next_works(
    finished: Path, tmp_path: Path, kind: str, code: int, rank: int
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    before = all_files(run)
    told = json.dumps({"kind": kind, "code": code, "rank": rank, "name": "iter_0000006"})
    arguments = [told, f"run.dir={run}", *BASE, "train.train_iters=8"]
    ended = call_on_ranks(train_unreadable, arguments, folder=run, ranks=2)
    assert ended.statuses == (1, 1), ended.text
    for output in ended.outputs:
        assert f"cannot be read now: {os.strerror(code)} (errno {code})" in output
        assert "iter_0000006" in output
        assert "load an older iteration with checkpoint.ckpt_step." in output
    assert {**all_files(run), "checkpoints/lock": b""} == {**before, "checkpoints/lock": b""}
    again = run_ok(run, [*BASE, "train.train_iters=8"], ranks=2)
    assert "iteration 6 from" in again.outputs[0]
    assert [row[0] for row in curve(run)] == list(range(1, 9))


def train_apart(arguments: list[str]) -> None:
    """Run the trainer's command where rank 1 is another host: it has an older state of a folder under its path."""
    told = json.loads(arguments[0])
    patience.RETRY_S = RETRY_S
    if os.environ["RANK"] == "1":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "no mount namespace")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "--bind", told["older"], told["folder"]], check=True)
    sys.argv = ["trainer", *arguments[1:]]
    trainer.__main__.main()


def test_a_host_that_does_not_see_the_newest_checkpoint_is_named(finished: Path, tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces can be made here")
    source, older = tmp_path / "source", tmp_path / "older"
    for path in (source, older):
        shutil.copytree(finished / "checkpoints", path)
    shutil.rmtree(older / "iter_0000006")
    before = all_files(source)
    run = tmp_path / "run"
    told = json.dumps({"folder": str(source), "older": str(older)})
    arguments = [told, f"run.dir={run}", *BASE, "train.train_iters=8", f"checkpoint.load={source}"]
    ended = call_on_ranks(train_apart, arguments, folder=run, ranks=2)
    assert ended.statuses == (1, 1), ended.text
    for output in ended.outputs:
        assert f"Rank 1 on host {socket.gethostname()} does not see the checkpoint that rank 0 loads" in output
        assert str(source / "iter_0000006") in output
    assert all_files(source) == before
    assert not (run / "metrics.jsonl").exists()
