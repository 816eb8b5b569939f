"""Moving averages of the parameters: their values, their bits over kills and topologies, and their uses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.harness import TINY, curve, launch, run_ok, tensor_files
from trainer.commands import convert, generate
from trainer.interop.open_model import open_model

DECAY = 0.9
BASE = ("model=gpt2_tiny", *TINY, "train.train_iters=6", "checkpoint.save_interval=2", "train.threads=1")
EMA = (*BASE, f"train.ema_decay={DECAY}", "train.eval_interval=3", "train.eval_iters=2")
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, []),
    "zero3": (2, ["parallel.zero_stage=3"]),
    "zero1": (3, ["parallel.zero_stage=1"]),
    "zero2": (2, ["parallel.zero_stage=2"]),
    "tp2": (2, ["parallel=tp2"]),
    "pp2": (2, ["parallel=pp2"]),
}
SLOW = [pytest.mark.slow, pytest.mark.nightly]
LAST = "checkpoints/iter_0000006"


def state(run: Path, iteration: int) -> dict[str, torch.Tensor]:
    folder = run / f"checkpoints/iter_{iteration:07d}"
    return {name: tensor for path in sorted(folder.rglob("*.safetensors")) for name, tensor in load_file(path).items()}


def average_losses(run: Path) -> list[str]:
    """Return the validation losses of the averages of a run, as hex."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["ema_loss_hex"] for row in rows if row.get("event") == "evaluation"]


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of one rank with averages, saved at every iteration."""
    folder = tmp_path_factory.mktemp("averaged") / "run"
    run_ok(folder, [*EMA, "checkpoint.save_interval=1"])
    return folder


def test_the_values_are_the_recurrence_in_float32(averaged: Path, tmp_path: Path) -> None:
    tensors = state(averaged, 1)
    names = [name for name in tensors if f"ema.{name}" in tensors]
    assert len(names) == len([name for name in tensors if name.startswith("exp_avg.")])
    averages = {name: tensors[f"ema.{name}"] for name in names}
    for iteration in range(2, 7):
        tensors = state(averaged, iteration)
        for name in names:
            averages[name] = averages[name] + (tensors[name] - averages[name]) * (1 - DECAY)
            assert averages[name].numpy().tobytes() == tensors[f"ema.{name}"].numpy().tobytes()
    run_ok(tmp_path / "plain", BASE)  # and training is that without them
    assert curve(averaged) == curve(tmp_path / "plain")
    plain = state(tmp_path / "plain", 6)
    assert plain.keys() == {name for name in tensors if not name.startswith("ema.")}
    assert all(torch.equal(plain[name], tensors[name]) for name in plain)


def test_both_are_evaluated_exported_and_sampled(
    averaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, rows = tmp_path / "out", [json.loads(line) for line in (averaged / "metrics.jsonl").read_text().splitlines()]
    evaluations = {row["iteration"]: row for row in rows if row.get("event") == "evaluation"}
    assert convert.main(["export", "hf", str(averaged), str(out), "--ema"]) == 0
    tensors = state(averaged, 6)
    exported = load_file(out / "model.safetensors")
    assert all(torch.equal(exported[name], tensors[f"ema.{name}"]) for name in exported)
    weights = dict(open_model(averaged, torch.device("cpu"), averages=True)[0].named_parameters())
    assert torch.equal(weights["transformer.ln_f.bias"], tensors["ema.transformer.ln_f.bias"])
    assert generate.main([str(averaged), "--ema", "--max-new-tokens", "3"]) == 0
    # A step with a rate of 0 changes nothing: the loss of the exported averages is that of the run's.
    still = ["train.train_iters=1", "optimizer.lr=0", "schedule.min_lr=0", "schedule.lr_warmup_iters=0"]
    load = [f"checkpoint.load={out}", "checkpoint.finetune=true", "train.eval_interval=1", "train.eval_iters=2"]
    run_ok(tmp_path / "still", [*BASE, *still, *load])
    (row,) = [
        r
        for line in (tmp_path / "still/metrics.jsonl").read_text().splitlines()
        if "event" in (r := json.loads(line)) and r["event"] == "evaluation"
    ]
    assert row["valid_loss_hex"] == evaluations[6]["ema_loss_hex"] != evaluations[6]["valid_loss_hex"]
    capsys.readouterr()
    assert convert.main(["export", "hf", str(tmp_path / "still"), str(tmp_path / "none"), "--ema"]) == 2
    assert "A checkpoint has no moving averages" in capsys.readouterr().err


@pytest.mark.parametrize("layout", [pytest.param(name, marks=[] if name == "zero3" else SLOW) for name in LAYOUTS])
def test_a_killed_run_resumes_with_their_bits(tmp_path: Path, layout: str) -> None:
    ranks, topology = LAYOUTS[layout]
    run_ok(tmp_path / "whole", [*EMA, *topology], ranks=ranks)
    killed = launch(tmp_path / "killed", [*EMA, *topology], ranks=ranks, kill_after=5, saved=4)
    assert set(killed.statuses) == {-9}
    run_ok(tmp_path / "killed", [*EMA, *topology], ranks=ranks)
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    assert tensor_files(tmp_path / "killed" / LAST) == tensor_files(tmp_path / "whole" / LAST)


@pytest.mark.parametrize("layout", ["one rank", pytest.param("zero3", marks=SLOW[:1]), pytest.param("pp2", marks=SLOW)])
def test_offloaded_averages_have_the_same_bits(averaged: Path, tmp_path: Path, layout: str) -> None:
    ranks, topology = LAYOUTS[layout]
    offload = [*EMA, *topology, "train.ema_offload=true"]
    killed = launch(tmp_path / "run", offload, ranks=ranks, kill_after=5, saved=4)
    assert set(killed.statuses) == {-9}
    run_ok(tmp_path / "run", offload, ranks=ranks)
    whole = averaged
    if ranks > 1:
        whole = tmp_path / "whole"
        run_ok(whole, [*EMA, *topology], ranks=ranks)
    assert curve(tmp_path / "run") == curve(whole)
    assert tensor_files(tmp_path / "run" / LAST) == tensor_files(whole / LAST)
    assert average_losses(tmp_path / "run") == average_losses(whole) != []


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["zero3", "zero2", "pp2"])
def test_invariant_ranks_keep_their_bits_and_moves_too(tmp_path: Path, layout: str) -> None:
    ranks, topology = LAYOUTS[layout]
    run = [*EMA, "parallel.invariant_ranks=2"]
    run_ok(tmp_path / "one", run)
    run_ok(tmp_path / "many", [*run, *topology], ranks=ranks)
    assert tensor_files(tmp_path / "many" / LAST) == tensor_files(tmp_path / "one" / LAST)
    moved = [*run, *topology, "checkpoint.reshard=true"]
    load = f"checkpoint.load={tmp_path}/one/checkpoints/iter_0000004"
    run_ok(tmp_path / "moved", [*moved, load], ranks=ranks)
    assert tensor_files(tmp_path / "moved" / LAST) == tensor_files(tmp_path / "one" / LAST)


@pytest.mark.slow
def test_averages_begin_with_the_weights_and_may_end(averaged: Path, tmp_path: Path) -> None:
    run_ok(tmp_path / "run", [*BASE, "train.train_iters=4", "schedule.lr_decay_iters=6"])
    ended = run_ok(tmp_path / "run", [*EMA, "checkpoint.save_interval=1"])
    assert "the moving average begins with the weights" in ended.text
    before, after = state(tmp_path / "run", 4), state(tmp_path / "run", 5)
    for name in (name for name in after if name.startswith("ema.")):
        old, new = before[name.removeprefix("ema.")], after[name.removeprefix("ema.")]
        assert torch.equal(after[name], old + (new - old) * (1 - DECAY))
    load = [f"checkpoint.load={averaged}/checkpoints/iter_0000004"]
    run_ok(tmp_path / "off", [*BASE, *load])
    assert curve(tmp_path / "off") == curve(averaged)[4:]
