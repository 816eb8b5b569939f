"""The battery on a device: its code on a CPU in tiny sizes, its clock, and its table."""

from __future__ import annotations

import json
import math
import resource
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.api import CheckpointException

from models.config import Family
from scripts.bench import cuda as bench_cuda
from scripts.bench import cuda_saves, cuda_steps, cuda_table
from scripts.bench.cuda_group import EAGER, LEFT_OUT, Clock, Device, MeasuredSide, Setting, measure_sides, read_rows
from scripts.bench.cuda_variants import DROPOUT, RECOMPUTE, SELECTIVE, UNSEEDED, VARIANTS, variant
from trainer.config.compose import compose
from trainer.launch import process_group as launch

STEP, SAVE = "step gpt2_124m", "save gpt2_1558m"


def run_group(folder: Path, group: str, *sides: str) -> dict[str, dict[str, object]]:
    """Measure sides of a group in this process, tiny and on the CPU."""
    files, results = folder / "files", folder / "rows.jsonl"
    files.mkdir()
    arguments = [
        "--group",
        group,
        "--size",
        "tiny",
        "--device",
        "cpu",
        "--folder",
        str(files),
        "--results",
        str(results),
    ]
    threads = torch.get_num_threads()
    try:
        assert bench_cuda.main([*arguments, "--sides", ";".join(sides)]) == 0
    finally:
        torch.set_num_threads(threads)
    rows = {str(row["side"]): row for row in read_rows(results)}
    assert list(rows) == list(sides)
    assert not any(LEFT_OUT in row for row in rows.values()), rows
    return rows


@pytest.mark.nightly
def test_saves_and_loads_are_measured_beside_a_copy(tmp_path: Path) -> None:
    dcp = ("DCP async_save, thread", "DCP async_save, process")
    rows = run_group(tmp_path, SAVE, "pinned copy", "reprise", "reprise, load", "safetensors load_file", *dcp)
    for name in ("reprise", *dcp):
        assert {"stall_s", "first_stall_s", "cost_s", "durable_s", "host_peak_bytes"} <= rows[name].keys()
    assert rows["reprise, load"]["state_bytes"] == rows["safetensors load_file"]["state_bytes"]
    assert all(float(str(rows[name]["load_s"])) > 0 for name in ("reprise, load", "safetensors load_file"))


def test_steps_are_measured_beside_others(tmp_path: Path) -> None:
    rows = run_group(tmp_path, STEP, "reprise", "nanoGPT's way", "transformers")
    assert all(float(str(row["tokens_per_s"])) > 0 for row in rows.values())


@pytest.mark.parametrize("model", ["gpt2_tiny", "llama3_tiny"])
def test_variants_of_the_step_have_its_loss(model: str) -> None:
    threads = torch.get_num_threads()
    cluster = launch.start("cpu", deterministic=False, threads=1, variables={})
    torch.set_num_threads(threads)
    setting = Setting(compose([f"model={model}"]).model, 2, 16, False, 1, 1)
    names = [name for name in VARIANTS if name not in (DROPOUT, UNSEEDED) or setting.model.family is Family.gpt2]
    losses = []
    for build in (cuda_steps._ours, *(partial(variant, name) for name in names)):
        torch.manual_seed(1)
        step = build(setting, cluster)
        losses.append([step() for _ in range(3)])
    found = dict(zip(names, losses[1:], strict=True))
    assert losses[0] not in (found.pop(DROPOUT, None), found.pop(UNSEEDED, None))
    assert found[RECOMPUTE] == found[SELECTIVE] == losses[0]


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_variants_of_the_step_are_compiled(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """The graphs are the same; inductor takes a while to make code of them."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    threads = torch.get_num_threads()
    cluster = launch.start("cpu", deterministic=False, threads=1, variables={})
    torch.set_num_threads(threads)
    setting = Setting(replace(compose(["model=gpt2_tiny"]).model, n_layer=1), 2, 16, True, 1, 1)
    for name in VARIANTS:
        torch.compiler.reset()
        counters.clear()
        step = variant(name, setting, cluster)
        step()
        assert counters["stats"]["unique_graphs"] >= 1, name
        assert name == DROPOUT or not counters["graph_break"], name
        assert math.isfinite(step())


def test_groups_for_which_there_is_no_time_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert bench_cuda.main(["--device", "cpu", "--seconds", "10", "--folder", str(tmp_path)]) == 0
    shown, found = capsys.readouterr().out, json.loads((tmp_path / "bench-cuda.json").read_text())
    assert [row["group"] for row in found["rows"]] == list(bench_cuda.GROUPS)
    assert all("s were left" in row[LEFT_OUT] for row in found["rows"])
    assert shown.count("left out: begins with") == len(bench_cuda.GROUPS)
    assert [path.name for path in tmp_path.iterdir()] == ["bench-cuda.json"]


def test_a_side_that_fails_leaves_the_others(tmp_path: Path) -> None:
    def fail() -> dict[str, float]:
        raise torch.OutOfMemoryError("CUDA out of memory\nand more")

    def fail_as_dcp() -> dict[str, float]:
        raise CheckpointException("the folder is lost", {})

    sides = {
        "bad": MeasuredSide(fail, 0.0),
        "dcp": MeasuredSide(fail_as_dcp, 0.0),
        "late": MeasuredSide(fail, 1e6),
        "good": MeasuredSide(lambda: {"load_s": 1.0}, 0.0),
    }
    results = tmp_path / "rows.jsonl"
    measure_sides(sides, Device(torch.device("cpu")), Clock(100.0), results, notes={EAGER: "no compiler"})
    with results.open("a") as file:
        file.write('{"side": "cut o')
    bad, dcp, late, good = read_rows(results)
    assert bad[LEFT_OUT] == "OutOfMemoryError: CUDA out of memory"
    assert str(dcp[LEFT_OUT]).startswith("CheckpointException: ")
    assert str(late[LEFT_OUT]).startswith("begins with 1000000 s")
    assert (good["load_s"], good[EAGER]) == (1.0, "no compiler")


def test_ratios_are_those_of_one_group() -> None:
    step = {"least_s": 0.1, "most_s": 0.3, "tokens_per_s": 100.0, "peak_bytes": 2e9, "mfu": 0.5}
    save = {"first_stall_s": 1.0, "durable_s": 2.0, "step_s": 0.1, "host_peak_bytes": 1e9, "device_peak_bytes": 3e9}
    rows = [
        {"group": STEP, "side": "reprise", "step_s": 0.2, **step},
        {"group": STEP, "side": "nanoGPT's way", "step_s": 0.25, **step},
        {"group": SAVE, "side": "pinned copy", "stall_s": 0.4, "state_bytes": 4e9},
        {"group": SAVE, "side": "reprise", "stall_s": 0.42, "cost_s": 0.5, **save},
        {"group": SAVE, "side": "DCP async_save, thread", "stall_s": 0.8, "cost_s": 2.0, **save},
        {"group": SAVE, "side": "DCP async_save, process", "stall_s": 0.8, "cost_s": 4.0, **save},
        {"group": SAVE, "side": "reprise, load", "load_s": 1.1, "state_bytes": 4e9},
        {"group": SAVE, "side": "safetensors load_file", "load_s": 1.0, "state_bytes": 4e9},
        {"group": "other", "side": "reprise", LEFT_OUT: "no time", EAGER: "no C compiler"},
    ]
    shown = "\n".join(cuda_table.lines({"machine": ["device: H200"], "size": "full", "seconds": 400.0, "rows": rows}))
    for text in (
        "- device: H200",
        "200.0 ms (100.0 to 300.0), 100 tok/s, MFU 50.0%, peak 2.0 GB",
        "reprise 1.250 x as fast",
        "0.400 s, 10.0 GB/s",
        "stall 1.050 of the copy; cost 0.250 of DCP's best",
        "stall 2.000 of the copy",
        "1.100 of load_file",
        "left out: no time",
        ">= 1.0: met",
        "<= 1.1: met; <= 0.5: met",
        "<= 1.2: met",
        "- Goal: step gpt2_124m, speed of the step over nanoGPT's way: 1.250, >= 1.0: met",
        "- Goal: step gpt2_1558m, speed of the step over nanoGPT's way: not measured, >= 1.0",
        "- Goal: save gpt2_1558m, cost of a save to training over DCP's best: 0.250, <= 0.5: met",
        "- Not compiled: no C compiler",
    ):
        assert text in shown, text


def test_a_goal_needs_all_that_it_is_measured_against() -> None:
    step = {"least_s": 0.1, "most_s": 0.3, "tokens_per_s": 100.0, "peak_bytes": 2e9, EAGER: "no C compiler"}
    rows = [
        {"group": STEP, "side": "reprise", "step_s": 0.2, **step},
        {"group": STEP, "side": "nanoGPT's way", "step_s": 0.25, **step},
        {"group": SAVE, "side": "reprise", "stall_s": 0.42, "cost_s": 0.5},
        {"group": SAVE, "side": "DCP async_save, thread", "stall_s": 0.8, "cost_s": 2.0},
        {"group": SAVE, "side": "DCP async_save, process", LEFT_OUT: "no shared memory"},
    ]
    shown = {line.partition(", ")[2].partition(": ")[0]: line for line in cuda_table.goals(rows)}
    assert "not measured" in shown["speed of the step over nanoGPT's way"]
    assert "not measured" in shown["cost of a save to training over DCP's best"]


def test_groups_without_goals_are_measured_beside_ours() -> None:
    others = bench_cuda._groups("others")
    assert set(others) | {group for group, _ in cuda_table.GOALS} == set(bench_cuda.GROUPS)
    assert bench_cuda._groups(f"{STEP};others") == (STEP, *others)
    group = bench_cuda.GROUPS["transformers gpt2_124m"]
    assert bench_cuda._sides_beside(group, []) == ("reprise", "transformers")
    assert bench_cuda._sides_beside(group, [{"group": STEP, "side": "reprise"}]) == ("transformers",)
    assert bench_cuda._sides_beside(group, [{"group": STEP, "side": "reprise", LEFT_OUT: "no time"}])[0] == "reprise"
    assert bench_cuda._sides_beside(bench_cuda.GROUPS[STEP], []) == ("reprise", "nanoGPT's way")


def test_a_state_larger_than_shared_memory_is_refused(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with pytest.raises(MemoryError, match=r"GB free, the state takes 1000000000\.0 GB"):
            cuda_saves._require_shared_memory(10**18, folder=tmp_path)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        cuda_saves._require_shared_memory(1, folder=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_every_group_has_a_model_and_a_batch_that_fits_it() -> None:
    for name in bench_cuda.GROUPS:
        full, tiny = (bench_cuda.setting_of(name, size) for size in bench_cuda.SIZES)
        assert full.model.family is tiny.model.family
        assert full.seq_length == 1024 <= full.model.max_position_embeddings
        assert (full.compiles, tiny.compiles) == (True, False)
