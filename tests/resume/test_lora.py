"""A run of adapters that is killed resumes with the same bits, on its base and on no other."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reprise.channel import single_rank_channel
from reprise.errors import CheckpointError, MismatchError
from tests.harness import TINY, built, compose, curve, filled, launch, run_ok, tensor_files
from trainer.commands import checkpoint as command
from trainer.interop.open_model import open_model
from trainer.launch.process_group import Cluster
from trainer.run.build import Run

BASE = [*TINY, "train.micro_batch_size=3", "train.threads=1", "checkpoint.save_interval=2", "schedule.lr_decay_iters=8"]
LORA = ["model.lora.rank=4", "model.lora.dropout=0.1", "train.train_iters=8", "optimizer.lr=0.01"]
MODELS = {
    "gpt2": ["model=gpt2_tiny", "model.lora.target_modules=[c_attn,c_proj]"],
    "llama3": ["model=llama3_tiny", "model.n_kv_head=2", "model.lora.target_modules=[q_proj,o_proj,up_proj,down_proj]"],
}
TP = "parallel.tensor_model_parallel_size=2"
SP = "parallel.sequence_parallel=true"
PP = "parallel.pipeline_model_parallel_size=2"
TOPOLOGIES = {"1": (1, list[str]()), "zero3": (2, ["parallel.zero_stage=3"]), "tp2": (2, [TP])}
FIRST, LAST = (f"checkpoints/iter_{iteration:07d}" for iteration in (4, 8))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a checkpoint of each family to put adapters on."""
    found = {}
    for name, model in MODELS.items():
        folder = tmp_path_factory.mktemp("base") / name
        run_ok(folder, [*BASE, model[0], *(m for m in model[1:] if "lora" not in m), "train.train_iters=4"])
        found[name] = folder / FIRST
    return found


def on(base: Path, model: str, *more: str) -> list[str]:
    start = [f"checkpoint.load={base}", "checkpoint.finetune=true"]
    return [*BASE, *MODELS[model], *LORA, *start, *more]


@pytest.mark.parametrize(
    "topology", [pytest.param(t, marks=() if t == "zero3" else pytest.mark.slow) for t in TOPOLOGIES]
)
@pytest.mark.parametrize("model", ["gpt2", pytest.param("llama3", marks=[pytest.mark.slow, pytest.mark.nightly])])
def test_a_killed_run_resumes_bitwise(bases: dict[str, Path], tmp_path: Path, model: str, topology: str) -> None:
    ranks, axes = TOPOLOGIES[topology]
    run = on(bases[model], model, *axes)
    run_ok(tmp_path / "whole", run, ranks=ranks)
    killed = launch(tmp_path / "killed", run, ranks=ranks, kill_after=5, saved=4)
    assert set(killed.statuses) == {-9}
    resumed = run_ok(tmp_path / "killed", run, ranks=ranks)
    assert f"the base from {bases[model]}" in resumed.text
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    assert tensor_files(tmp_path / "killed" / LAST) == tensor_files(tmp_path / "whole" / LAST)


@pytest.fixture(scope="module")
def alone(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a run of one rank with lanes for each family."""
    found = {}
    for name, base in bases.items():
        found[name] = tmp_path_factory.mktemp("alone") / name
        run_ok(found[name], on(base, name, "parallel.invariant_ranks=4", "train.train_iters=4"))
    return found


INVARIANT = {
    "zero3": (2, ["parallel.zero_stage=3"]),
    "pp2": (2, [PP]),
    "zero0": (2, ["parallel.zero_stage=0"]),
    "zero2": (2, ["parallel.zero_stage=2"]),
    "pp2 zero1": (4, [PP, "parallel.zero_stage=1"]),
    "recomputed pp2": (2, [PP, "train.activation_checkpointing=true"]),
}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", INVARIANT)
def test_every_topology_has_the_bits_of_one_rank(
    bases: dict[str, Path], alone: dict[str, Path], tmp_path: Path, model: str, case: str
) -> None:
    ranks, axes = INVARIANT[case]
    run_ok(
        tmp_path / "run",
        on(bases[model], model, "parallel.invariant_ranks=4", "train.train_iters=4", *axes),
        ranks=ranks,
    )
    assert curve(tmp_path / "run") == curve(alone[model])
    assert tensor_files(tmp_path / "run" / FIRST) == tensor_files(alone[model] / FIRST)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [[TP], pytest.param([TP, SP], marks=pytest.mark.nightly)], ids=["tp2", "tp2+sp"])
@pytest.mark.parametrize("model", ["gpt2", pytest.param("llama3", marks=pytest.mark.nightly)])
def test_tensor_parallel_ranks_write_the_bytes_of_one(
    bases: dict[str, Path], alone: dict[str, Path], tmp_path: Path, model: str, axes: list[str]
) -> None:
    # The trained adapters of one rank, loaded and saved at once.
    saved = [f"checkpoint.base={bases[model]}", f"checkpoint.load={alone[model] / FIRST}", "checkpoint.finetune=false"]
    lanes = ["parallel.invariant_ranks=4", "checkpoint.reshard=true", "train.train_iters=4"]
    run_ok(tmp_path / "moved", [*on(bases[model], model), *lanes, *saved, *axes], ranks=2)
    assert tensor_files(tmp_path / "moved" / FIRST) == tensor_files(alone[model] / FIRST)
    # The initial values, which a rate of 0 leaves as they are.
    still = ["optimizer.lr=0.0", "schedule.min_lr=0.0", "train.train_iters=4"]
    weights = []
    for name, more, ranks in (("one", list[str](), 1), ("two", axes, 2)):
        run_ok(tmp_path / name, on(bases[model], model, *still, *more), ranks=ranks)
        weights.append((tmp_path / name / FIRST / "adapter_model.safetensors").read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize("model", [pytest.param("gpt2", marks=pytest.mark.nightly), "llama3"])
def test_tensor_parallel_ranks_train_the_curve_of_one(bases: dict[str, Path], tmp_path: Path, model: str) -> None:
    found = []
    for name, axes, ranks in (("one", list[str](), 1), ("two", [TP, SP], 2)):
        dry = ["model.lora.dropout=0.0", *(["model.dropout=0.0"] if model == "gpt2" else [])]
        run_ok(tmp_path / name, on(bases[model], model, *dry, *axes), ranks=ranks)
        found.append([float.fromhex(row[1]) for row in curve(tmp_path / name)])
    # Sums in another order: float32 rounding, and what the optimizer makes of it in seven further iterations.
    assert found[1] == pytest.approx(found[0], rel=2e-5)


@pytest.mark.slow
def test_another_base_or_none_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    run = [*BASE, *MODELS["gpt2"], *LORA]
    begin = [f"checkpoint.load={bases['gpt2']}", "checkpoint.finetune=true", "train.train_iters=4"]
    run_ok(tmp_path / "run", [*run, *begin])
    before = tensor_files(tmp_path / "run" / FIRST)

    none = launch(tmp_path / "run", [*run, "train.train_iters=8"])
    assert not none.ok
    assert "needs the weights beneath the adapters: checkpoint.base=PATH" in none.text
    other = bases["gpt2"].with_name("iter_0000002")
    refused = launch(tmp_path / "run", [*run, f"checkpoint.base={other}"])
    assert not refused.ok
    assert "base.xxh3_64" in refused.text
    assert "set checkpoint.base to it" in refused.text
    adapters = launch(tmp_path / "run", [*run, f"checkpoint.base={tmp_path / 'run' / FIRST}"])
    assert "holds adapters alone" in adapters.text
    missing = launch(tmp_path / "run", [*run, f"checkpoint.base={tmp_path / 'nowhere'}"])
    assert not missing.ok
    assert "nowhere" in missing.text
    assert tensor_files(tmp_path / "run" / FIRST) == before
    # The same bytes at another path are the same base.
    moved = shutil.copytree(bases["gpt2"], tmp_path / "moved")
    run_ok(tmp_path / "run", [*run, f"checkpoint.base={moved}"])
    assert curve(tmp_path / "run")[-1][0] == 8


@pytest.mark.slow
def test_whole_weights_and_adapters_are_not_confused(bases: dict[str, Path], tmp_path: Path) -> None:
    run = on(bases["gpt2"], "gpt2", "train.train_iters=4")
    run_ok(tmp_path / "run", run)
    whole = launch(tmp_path / "whole", [*BASE, "model=gpt2_tiny", f"checkpoint.load={tmp_path / 'run' / FIRST}"])
    assert not whole.ok
    assert "model.lora.rank" in whole.text
    load = [f"checkpoint.base={bases['gpt2']}", f"checkpoint.load={bases['gpt2']}", "checkpoint.finetune=false"]
    adapters = launch(tmp_path / "adapters", [*run, *load])
    assert not adapters.ok
    assert "model.lora.rank" in adapters.text
    # The adapters of one run begin another, at iteration 0.
    again = [*run, f"checkpoint.base={bases['gpt2']}", f"checkpoint.load={tmp_path / 'run' / FIRST}"]
    run_ok(tmp_path / "again", again)
    assert [row[0] for row in curve(tmp_path / "again")] == [1, 2, 3, 4]
    assert curve(tmp_path / "again")[0][1] != curve(tmp_path / "run")[0][1]


@pytest.mark.slow
def test_a_folder_and_its_base_continue_the_run(bases: dict[str, Path], tmp_path: Path) -> None:
    run_ok(tmp_path / "run", on(bases["gpt2"], "gpt2", "train.micro_batch_size=2"))
    folder = shutil.copytree(tmp_path / "run" / FIRST, tmp_path / "given" / Path(FIRST).name)
    given = [f"checkpoint.load={folder}", f"checkpoint.base={bases['gpt2']}", "logging.tensorboard=false"]
    run_ok(tmp_path / "again", given)
    assert curve(tmp_path / "again") == curve(tmp_path / "run")[4:]
    assert tensor_files(tmp_path / "again" / LAST) == tensor_files(tmp_path / "run" / LAST)


@pytest.fixture(scope="module")
def tuned(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of adapters on iteration 2 of a base that has newer ones."""
    folder = tmp_path_factory.mktemp("tuned") / "run"
    run_ok(folder, on(bases["gpt2"].with_name("iter_0000002"), "gpt2", "train.train_iters=4"))
    return folder


def test_no_path_is_recorded(bases: dict[str, Path], tuned: Path) -> None:
    for path in (tuned / FIRST).glob("*.json"):
        assert str(bases["gpt2"].parent) not in path.read_text()


def restored(run_dir: Path, *overrides: str) -> Run:
    """Return a run of adapters, in this process, after its start; it holds no lock."""
    cluster = Cluster(0, 1, torch.device("cpu"), 1, single_rank_channel(), "test")
    keys = [*BASE, *MODELS["gpt2"], *LORA, *overrides]
    run = built(compose([*keys, f"run.dir={run_dir}", "train.train_iters=4"]), cluster)
    try:
        run = filled(run)
    finally:
        run.saves.close()
    return run


def test_another_base_is_refused_before_it_is_read(
    bases: dict[str, Path], tuned: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(MismatchError, match=r"(?s)base\.xxh3_64.*set checkpoint\.base to it"):
        restored(tuned, f"checkpoint.base={bases['gpt2']}")
    assert "the base from" not in caplog.text


def test_the_base_is_found_in_a_run_that_went_on(
    bases: dict[str, Path], tuned: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    base = bases["gpt2"].parents[1]
    assert restored(tuned, f"checkpoint.base={base}").state.progress.iteration == 4
    assert f"the base from {base / 'checkpoints/iter_0000002'}" in caplog.text
    model, folder = open_model(tuned, torch.device("cpu"), base)
    assert folder == tuned / FIRST
    assert model.config.n_layer == 2


def test_merged_adapters_begin_a_run_on_their_base(bases: dict[str, Path], tuned: Path, tmp_path: Path) -> None:
    assert command.main(["merge", str(tuned), str(tmp_path / "out"), "--from", "2", "--to", "4"]) == 0
    base = f"checkpoint.base={bases['gpt2'].with_name('iter_0000002')}"
    run = restored(tmp_path / "run", base, f"checkpoint.load={tmp_path / 'out'}", "checkpoint.finetune=true")
    parts = [load_file(tuned / f"checkpoints/iter_{i:07d}/adapter_model.safetensors") for i in (2, 4)]
    name = "base_model.model.transformer.h.0.attn.c_proj.lora_A.weight"
    (shard,) = (shard for shard in run.state.shards() if shard.spec.name == name)
    assert torch.equal(shard.local, ((parts[0][name].double() + parts[1][name].double()) / 2).float())


def test_a_base_of_another_model_names_no_other_run(bases: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"(?s)The base is another model.*model\.n_embd.*name another base"):
        restored(tmp_path / "run", "model.n_embd=24", f"checkpoint.base={bases['gpt2']}")
    with pytest.raises(CheckpointError, match=r"Correct checkpoint\.base"):
        restored(tmp_path / "run", f"checkpoint.base={tmp_path / 'nowhere'}")
