"""Hosts that do not have the same tokens, and token files that are cut while a run reads them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.crash.hosts import Mount, on_hosts, run_trainer
from tests.crash.moments import standing
from tests.crash.outcomes import assert_ends_as
from tests.harness import DEADLINE_S, TINY, Ended, all_files, call_on_ranks, run_ok
from tests.profiles import nightly
from trainer.data.fingerprint import scan
from trainer.data.token_file import open_token_file, write_token_file

pytestmark = pytest.mark.slow

TOKENS = 4000


def write(path: Path, tokens: np.ndarray | int) -> None:
    """Write a file of tokens; a number stands for those of a seed."""
    path.parent.mkdir(exist_ok=True)
    if isinstance(tokens, int):
        tokens = np.random.default_rng(tokens).integers(0, 256, TOKENS)
    write_token_file(path, [tokens], dtype=np.uint16)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder of two training files and one for validation."""
    for number, name in enumerate(("train_0", "train_1", "valid")):
        write(tmp_path / "data" / f"{name}.bin", number)
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


ALONE = ("data.valid=null", "train.eval_interval=0")


def train(data: Path, iterations: int, *more: str, other: Path | None = None, run: str = "run") -> Ended:
    """Train on two hosts, of which the second sees another folder of data."""
    arguments = [f"run.dir={data.with_name(run)}", *overrides(data, iterations), *more]
    ranks = on_hosts(run_trainer, {1: [] if other is None else [Mount(data, other)]})
    return call_on_ranks(ranks, arguments, folder=data.with_name(run), ranks=2)


def assert_refused(ended: Ended, *words: str) -> None:
    assert ended.statuses == (1, 1), ended.text
    for output in ended.outputs:
        assert [word for word in words if word not in output] == [], output


@pytest.mark.parametrize(
    ("side", "name", "change", "resumes"),
    [
        ("train", "train_1.bin", "token", False),
        ("valid", "valid.bin", "token", False),
        ("train", "train_1.bin", "shorter", True),
        nightly("train", "train_1.bin", "shorter", False),
        nightly("train", "train_1.bin", "token", True),
    ],
)
def test_a_host_with_other_tokens_ends_the_run_unchanged(
    data: Path, side: str, name: str, change: str, resumes: bool
) -> None:
    run, other = data.with_name("run"), data.with_name("other")
    if resumes:
        assert train(data, 6, run="whole").ok
        assert train(data, 4).ok
    before = all_files(run / "checkpoints")
    shutil.copytree(data, other)
    tokens = open_token_file(data / name).read()
    if change == "token":
        tokens[TOKENS // 2] ^= 1
    write(other / name, tokens if change == "token" else tokens[:-1])
    words = []
    for folder, place in ((data, "host host0, rank 0: "), (other, "found ")):
        file = open_token_file(folder / name)
        words += [f"{place}{data / name} with {file.nbytes} bytes", f"digest {scan(file).digest} of"]
    assert_refused(train(data, 6, other=other), "data (host host1, rank 1)", f"in data.{side}", *words)
    assert all_files(run / "checkpoints") == before
    if resumes:
        assert train(data, 6).ok
        assert_ends_as(run, data.with_name("whole"))
    else:
        assert not (run / "metrics.jsonl").exists()


def test_a_host_without_a_file_ends_the_run_and_is_named(data: Path) -> None:
    other = data.with_name("other")
    write(other / "train_0.bin", np.arange(9))
    (other / "valid.bin").write_bytes(b"")
    ended = train(data, 4, other=other)
    assert_refused(ended, f"({data}/valid.bin)")
    assert "Rank 1" in ended.outputs[0]


def test_a_host_whose_sources_have_other_files_is_named(data: Path) -> None:
    other = data.with_name("other")
    for folder, names in ((data, ("a_0", "a_1", "b_0")), (other, ("a_0", "b_0", "b_1"))):
        for number, name in enumerate(names):  # the same tokens in the same order
            write(folder / f"{name}.bin", number)
    blend = f"data.train=[{{path: {data}/a_*.bin, weight: 1}}, {{path: {data}/b_*.bin, weight: 2}}]"
    ended = train(data, 4, blend, *ALONE, other=other)
    words = [
        f"{data}/{name}.bin with {2 * TOKENS} bytes of uint16 in data.train[{n}]"
        for n, name in enumerate(("a_1", "b_0"))
    ]
    assert_refused(ended, "(host host1, rank 1)", f"rank 0: {words[0]}", f"found {words[1]}")
    assert not data.with_name("run").joinpath("metrics.jsonl").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_truncated_token_file_ends_all_ranks_by_name_and_size(data: Path, tmp_path: Path, ranks: int) -> None:
    run, given, kept = tmp_path / "run", overrides(data, 9), data.with_name("kept")
    path = data / "train_0.bin"
    size = path.stat().st_size
    shutil.copytree(data, kept)
    with standing(run, given, moment="step", iteration=3, ranks=ranks) as (running, gate):
        gate.await_reached()
        for found in data.glob("train_*.bin"):
            os.truncate(found, 0)
        gate.open()
        running.join(DEADLINE_S)
    ended = running.ended()
    assert ended.statuses == (1,) * ranks, ended.text
    assert f"expected {size} bytes, found 0 bytes" in ended.text
    shutil.copytree(kept, data, dirs_exist_ok=True)
    for folder in (run, tmp_path / "whole"):
        run_ok(folder, given, ranks=ranks)
    assert_ends_as(run, tmp_path / "whole")
