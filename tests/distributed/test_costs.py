"""What loading, refusing and building cost on each rank: bytes read, files opened, memory."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import trainer.__main__
from reprise.format.manifest import BLOCK_BYTES
from reprise.loading import LoadSource, Restorer
from tests.fakes import CountedReads
from tests.harness import TINY, built, call_on_ranks, compose, filled, run_ok, tensor_files
from tests.profiles import nightly
from trainer.launch import process_group as launch
from trainer.run.build import Run

_TP2 = "parallel.tensor_model_parallel_size=2"
_REAL_ROWS = (
    "model=gpt2_124m",
    "model.pad_vocab_multiple=1",
    "model.n_layer=1",
    "model.n_embd=48",
    "model.n_head=6",
    "model.intermediate_size=192",
    "train.seq_length=16",
    "train.train_iters=2",
    "train.global_batch_size=6",
    "train.micro_batch_size=1",
    "schedule.lr_warmup_iters=0",
    "logging.tensorboard=false",
)


def test_gpt2_s_own_vocabulary_goes_from_tp2_dp3_to_tp3_dp2(tmp_path: Path) -> None:
    """50257 rows, cut by two axes unevenly: torch's own chunk arithmetic is wrong here."""
    run_ok(tmp_path / "a", [*_REAL_ROWS, _TP2, "parallel.zero_stage=3"], ranks=6)
    source = tmp_path / "a/checkpoints/iter_0000002"
    axes = ["parallel.tensor_model_parallel_size=3", "parallel.zero_stage=3", "checkpoint.reshard=true"]
    run_ok(tmp_path / "b", [*_REAL_ROWS, *axes, f"checkpoint.load={source}"], ranks=6)
    assert tensor_files(tmp_path / "b/checkpoints/iter_0000002") == tensor_files(source)
    run_ok(tmp_path / "c", [*_REAL_ROWS, "checkpoint.reshard=true", f"checkpoint.load={source}"])
    assert tensor_files(tmp_path / "c/checkpoints/iter_0000002") == tensor_files(source)


def _train_and_count_opens(arguments: list[str]) -> None:
    opened: list[str] = []

    def hook(event: str, details: tuple[object, ...]) -> None:
        if event == "open" and str(details[0]).endswith(".safetensors"):
            opened.append(str(details[0]))

    sys.addaudithook(hook)
    exit_at_once = os._exit

    def report_and_exit(status: int) -> None:
        Path(f"{arguments[0]}.{os.environ['RANK']}").write_text(json.dumps(opened))
        exit_at_once(status)

    os._exit = report_and_exit  # type: ignore[assignment]
    sys.argv = ["trainer", *arguments[1:]]
    trainer.__main__.main()


def test_another_topology_is_refused_before_tensor_files_open(tmp_path: Path) -> None:
    tiny = ["model=gpt2_tiny", *TINY, "train.train_iters=3"]
    run_ok(tmp_path / "run", tiny)
    arguments = [str(tmp_path / "opened"), f"run.dir={tmp_path / 'run'}", *tiny, _TP2]
    ended = call_on_ranks(_train_and_count_opens, arguments, folder=tmp_path / "refused", ranks=2)
    assert ended.statuses == (1, 1)
    for rank in range(2):
        assert json.loads((tmp_path / f"opened.{rank}").read_text()) == []
    assert "parallel.tensor_model_parallel_size" in ended.text
    assert "saved 1" in ended.text
    assert "current 2" in ended.text
    assert "checkpoint.reshard=true" in ended.text


_COSTS = (
    "model=gpt2_tiny",
    "model.n_layer=4",
    "model.n_embd=512",
    "model.n_head=8",
    "model.intermediate_size=2048",
    "model.vocab_size=20000",
    "train.seq_length=16",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "train.train_iters=1",
    "schedule.lr_warmup_iters=0",
    "logging.tensorboard=false",
    "checkpoint.reshard=true",
)
# What blocks and chunks in flight, the JSON files and the allocator may take besides the state and its copies.
_BESIDES_BYTES = 48 << 20
_STAGING_BYTES = 96 << 20


def _measure(arguments: list[str]) -> None:
    """Build, load and save; write what was read, what is held, and the peak of resident memory above the start.

    Memory that the ranks share is in the peak with this rank's part of it.
    """
    output, source, target, *overrides = arguments
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    paths = [f"checkpoint.save={target}", f"run.dir={target}.run", f"checkpoint.load={source}"]
    config = compose([*overrides, *paths, f"checkpoint.staging_bytes={_STAGING_BYTES}"])
    cluster = launch.start("cpu", deterministic=False)
    torch.zeros(1 << 20).normal_()  # what torch allocates once
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak, see proc(5)
    run = built(config, cluster)
    run = filled(run)
    peak_load = _resident("VmHWM") - before
    shards = list(run.state.shards())
    held = sum(shard.local.nbytes for shard in shards)
    read = _reread(run, source)
    documents = {"trainer_state.json": {"format": "reprise/1", "iteration": 9}}
    (target,) = run.saves.targets
    target.saver.save(9, replace(run.state.contents(with_optimizer=True), documents=documents))
    target.saver.wait()
    shared = _resident("RssShmem")
    peak_save = _resident("VmHWM") - before - shared + shared // ranks
    with run.saves:  # which end
        pass
    sizes = {"held": held, "tensors": len(shards), "shared": shared}
    row = {**sizes, "read": read, "load": peak_load, "save": peak_save}
    Path(f"{output}.{rank}").write_text(json.dumps(row))
    launch.shutdown(cluster)


def _reread(run: Run, source: str) -> int:
    files = CountedReads()
    Restorer(run.cluster.channel, nonce="again", files=files).restore(
        LoadSource(Path(source)), check=lambda _: None, live=lambda _: list(run.state.shards()), is_new=True
    )
    return files.read_bytes


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise AssertionError(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "axes"),
    [
        (4, ("parallel.zero_stage=3",)),
        nightly(4, (_TP2, "parallel.zero_stage=3")),
        (2, ("parallel.pipeline_model_parallel_size=2",)),
    ],
)
def test_a_rank_reads_and_holds_little_more_than_its_own(tmp_path: Path, ranks: int, axes: tuple[str, ...]) -> None:
    run_ok(tmp_path / "one", list(_COSTS))
    source = tmp_path / "one/checkpoints/iter_0000001"
    arguments = [str(tmp_path / "row"), str(source), str(tmp_path / "again"), *_COSTS, *axes]
    ended = call_on_ranks(_measure, arguments, folder=tmp_path / "measured", ranks=ranks, timeout_s=60.0)
    assert ended.ok, ended.text
    for rank in range(ranks):
        row = json.loads((tmp_path / f"row.{rank}").read_text())
        print(ranks, axes, row)
        assert row["read"] <= 1.1 * row["held"] + row["tensors"] * BLOCK_BYTES
        assert row["load"] <= row["held"] + _BESIDES_BYTES
        assert row["save"] <= row["held"] + _STAGING_BYTES + _BESIDES_BYTES
        assert bool(row["shared"]) == (_TP2 in axes)
    assert tensor_files(tmp_path / "again/iter_0000009") == tensor_files(source)
