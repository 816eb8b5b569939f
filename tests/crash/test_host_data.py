"""Hosts that do not have the same tokens, and token files that are cut while a run reads them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.crash.hosts import Mount, on_hosts, run_trainer
from tests.crash.moments import standing
from tests.harness import DEADLINE_S, TINY, Ended, all_files, call_on_ranks, curve, run_ok
from trainer.data.fingerprint import fingerprint, scan
from trainer.data.indexed_file import write_indexed_file
from trainer.data.token_file import open_token_file, write_token_file

pytestmark = pytest.mark.slow

TOKENS = 4000
SIDES = {"train": "training", "valid": "validation"}


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


def train(run: Path, data: Path, iterations: int, mounts: list[Mount]) -> Ended:
    ranks = on_hosts(run_trainer, {1: mounts})
    return call_on_ranks(ranks, [f"run.dir={run}", *overrides(data, iterations)], folder=run, ranks=2)


def fingerprint_of(folder: Path, side: str) -> str:
    return fingerprint([scan(open_token_file(path)) for path in sorted(folder.glob(f"{side}*.bin"))])


def differ(data: Path, side: str, change: str) -> tuple[Path, str]:
    """Return a folder whose files differ from `data` in one, and the name of that."""
    other, name = data.with_name("other"), {"train": "train_1.bin", "valid": "valid.bin"}[side]
    shutil.copytree(data, other)
    tokens = open_token_file(data / name).read()
    if change == "token":
        tokens[TOKENS // 2] ^= 1
    write(other, name, tokens if change == "token" else tokens[:-1])
    return other, name


def check_refused(ended: Ended, data: Path, other: Path, *, side: str, name: str) -> None:
    assert ended.statuses == (1, 1), ended.text
    words = (
        f"same {SIDES[side]} data (host host1, rank 1)",
        f"host host0, rank 0: fingerprint {fingerprint_of(data, side)}",
        f"found fingerprint {fingerprint_of(other, side)}",
        f"{data / name} with {open_token_file(data / name).nbytes} bytes",
        f"{data / name} with {open_token_file(other / name).nbytes} bytes",
    )
    for output in ended.outputs:
        assert all(word in output for word in words), output


@pytest.mark.parametrize(("side", "change"), [("train", "token"), ("train", "shorter"), ("valid", "token")])
def test_a_host_with_other_tokens_ends_the_run_at_its_start(data: Path, tmp_path: Path, side: str, change: str) -> None:
    other, name = differ(data, side, change)
    ended = train(tmp_path / "run", data, 4, [Mount(data, other)])
    check_refused(ended, data, other, side=side, name=name)
    assert not list((tmp_path / "run").rglob("iter_*"))
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.parametrize("change", ["token", pytest.param("shorter", marks=pytest.mark.nightly)])
def test_a_host_with_other_tokens_ends_a_resume_unchanged(data: Path, tmp_path: Path, change: str) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert train(whole, data, 6, []).ok
    first = train(run, data, 4, [])
    assert first.ok, first.text
    before = all_files(run / "checkpoints")
    other, name = differ(data, "train", change)
    check_refused(train(run, data, 6, [Mount(data, other)]), data, other, side="train", name=name)
    assert all_files(run / "checkpoints") == before
    again = train(run, data, 6, [])
    assert again.ok, again.text
    assert curve(run) == curve(whole)


def test_a_host_with_a_copy_of_its_own_trains(data: Path, tmp_path: Path) -> None:
    copy = data.with_name("copy")
    shutil.copytree(data, copy)
    ended = train(tmp_path / "run", data, 4, [Mount(data, copy)])
    assert ended.ok, ended.text


def test_a_host_without_a_file_ends_the_run_and_is_named(data: Path, tmp_path: Path) -> None:
    other = data.with_name("other")
    write(other, "train_0.bin", np.arange(9))
    (other / "valid.bin").write_bytes(b"")
    ended = train(tmp_path / "run", data, 4, [Mount(data, other)])
    assert ended.statuses == (1, 1), ended.text
    for output in ended.outputs:
        assert f"shorter than its header ({data}/valid.bin)" in output, output
    assert "Rank 1" in ended.outputs[0]


def test_a_host_whose_sources_have_other_files_is_named(data: Path, tmp_path: Path) -> None:
    other = data.with_name("other")
    for folder, names in ((data, ("a_0", "a_1", "b_0")), (other, ("a_0", "b_0", "b_1"))):
        for number, name in enumerate(names):  # the same tokens in the same order
            write(folder, f"{name}.bin", np.random.default_rng(number).integers(0, 256, TOKENS))
    blend = f"data.train=[{{path: {data}/a_*.bin, weight: 1}}, {{path: {data}/b_*.bin, weight: 2}}]"
    given = [f"run.dir={tmp_path / 'run'}", *overrides(data, 4), blend, "train.eval_interval=0", "data.valid=null"]
    ranks = on_hosts(run_trainer, {1: [Mount(data, other)]})
    ended = call_on_ranks(ranks, given, folder=tmp_path / "run", ranks=2)
    assert ended.statuses == (1, 1), ended.text
    for output in ended.outputs:
        assert "same files in each source of training data (host host1, rank 1, data.train[0])" in output, output
        assert f"2 files, {data}/a_0.bin to {data}/a_1.bin" in output
        assert f"found {data}/a_0.bin" in output
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_host_whose_index_has_other_documents_is_named(data: Path, tmp_path: Path) -> None:
    other, tokens = data.with_name("other"), np.random.default_rng(1).integers(0, 256, TOKENS)
    for folder, end in ((data, 7), (other, 9)):  # the same tokens, which end documents elsewhere
        folder.mkdir(exist_ok=True)
        for name in ("a", "b"):
            ends = end if name == "b" else 7
            write_indexed_file(folder / f"{name}.bin", [tokens], dtype=np.dtype(np.uint16), end_of_text=ends)
    given = [f"run.dir={tmp_path / 'run'}", *overrides(data, 4), "data=megatron", "train.eval_interval=0"]
    given += ["data.valid=null", "data.samples=per_document", f"data.train={data}/*.bin"]
    for path in data.glob("[tv]*.bin"):
        path.unlink()
    ranks = on_hosts(run_trainer, {1: [Mount(data, other)]})
    ended = call_on_ranks(ranks, given, folder=tmp_path / "run", ranks=2)
    assert ended.statuses == (1, 1), ended.text
    for output in ended.outputs:
        assert "same documents in the training data, though the same tokens (host host1, rank 1)" in output, output
        assert f"the index of {data}/b.bin on host host0, rank 0" in output


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_truncated_token_file_ends_all_ranks_by_name_and_size(data: Path, tmp_path: Path, ranks: int) -> None:
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
        running.join(DEADLINE_S)
    ended = running.ended()
    assert ended.statuses == (1,) * ranks, ended.text
    assert "cut while it was in use" in ended.text
    assert f"expected {size} bytes, found 0 bytes" in ended.text
    for name in ("train_0.bin", "train_1.bin"):
        shutil.copy(kept / name, data / name)
    run_ok(run, given, ranks=ranks)
    run_ok(tmp_path / "whole", given, ranks=ranks)
    assert curve(run) == curve(tmp_path / "whole")
