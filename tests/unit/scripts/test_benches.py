"""The benchmarks run, and count what they say they count."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg as fake
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from scripts.bench import columns as bench_columns
from scripts.bench import planning as bench_planning
from scripts.bench import train as bench_train


def test_planning_is_measured_on_every_simulated_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_planning.main(["tiny", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == 8
    assert found["collectives"] == 0
    assert found["most_written"] <= 1.1 * found["mean_written"]
    # The data of the files, that is all but their headers, has been written once.
    assert 0 < found["checkpoint_bytes"] - found["mean_written"] * 8 < 1 << 18
    assert bench_planning.main(["tiny"]) == 0
    assert capsys.readouterr().out.startswith("tiny on 8 ranks")


def test_messages_between_ranks_are_counted_also_where_a_dtensor_sends_them() -> None:
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=8)
    try:
        mesh = init_device_mesh("cpu", (8,))
        cut = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)])
        with bench_planning.Collectives() as seen:
            torch.ones(4).sum()
            cut.detach()
            assert seen.count == 0
            dist.all_reduce(torch.ones(4))
            assert seen.count == 1
            cut.full_tensor()
            assert seen.count > 1
    finally:
        dist.destroy_process_group()


def test_training_is_measured_beside_transformers_on_the_same_values(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    arguments = ["tiny", "--rounds", "2", "--threads", str(threads), "--pad-vocab-multiple", "100", "--json"]
    assert bench_train.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["threads"], found["padded_vocab"]) == (threads, 100)
    assert found["tokens_per_s"].keys() == found["loss"].keys() == {"reprise", "transformers", bench_train.EAGER}
    assert all(rate > 0 for rate in found["tokens_per_s"].values())
    # Theirs leaves out the last target of every sample, and decays biases and norms too.
    assert found["loss"]["reprise"] == pytest.approx(found["loss"]["transformers"], rel=0.05)
    shown = bench_train.table(found, {bench_train.OURS: [200.0, 300.0], bench_train.THEIRS: [100.0, 200.0]})
    assert shown.startswith("tiny: device ")
    assert "padded_vocab 100" in shown
    assert "reprise is 1.750 times as fast" in shown


def test_training_is_not_measured_at_an_unknown_size_nor_without_one_of_the_sides(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_train.main(["tiny", "huge"])
    assert "'huge' is none of small, gpt2_124m, tiny" in capsys.readouterr().err
    # No such embedding can be built, so that the first process to be heard ends.
    with pytest.raises(SystemExit, match="the process of reprise ended, status 1"):
        bench_train.main(["tiny", "--rounds", "1", "--dropout", "2"])
    assert not multiprocessing.active_children()


def test_ways_to_write_columns_are_measured_beside_a_raw_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench_columns.main(["--mebibytes", "1", "--rounds", "1", "--runs", "2048", "--folder", str(tmp_path)])
    shown = capsys.readouterr().out
    for way in (bench_columns.DIRECT, bench_columns.SHARED, bench_columns.MAPPED, bench_columns.RUNS):
        assert way in shown
    assert list(tmp_path.iterdir()) == []
