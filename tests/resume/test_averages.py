"""Moving averages of the parameters: their values and uses. `test_bitwise_resume.py` has their bits over kills."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.harness import TINY, checkpoint, curve, run_ok
from tests.resume.differential import rows_of
from trainer.commands import convert, generate
from trainer.interop.open_model import open_model

DECAY = 0.9
BASE = ("model=gpt2_tiny", *TINY, "train.train_iters=6", "checkpoint.save_interval=2", "train.threads=1")
EMA = (*BASE, f"train.ema_decay={DECAY}", "train.eval_interval=3", "train.eval_iters=2")


def state(run: Path, number: int) -> dict[str, torch.Tensor]:
    files = sorted(checkpoint(run, number).rglob("*.safetensors"))
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def evaluations(run: Path) -> dict[object, dict[str, object]]:
    return {row["iteration"]: row for row in rows_of(run) if row.get("event") == "evaluation"}


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
    for number in range(2, 7):
        tensors = state(averaged, number)
        for name in names:
            averages[name] = averages[name] + (tensors[name] - averages[name]) * (1 - DECAY)
            assert averages[name].numpy().tobytes() == tensors[f"ema.{name}"].numpy().tobytes()
    run_ok(tmp_path / "plain", BASE)  # and training is that without them
    assert curve(averaged) == curve(tmp_path / "plain")
    plain = state(tmp_path / "plain", 6)
    assert plain.keys() == {name for name in tensors if not name.startswith("ema.")}
    assert all(torch.equal(plain[name], tensors[name]) for name in plain)


def test_both_are_evaluated_exported_and_generate(
    averaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
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
    last = evaluations(averaged)[6]
    assert evaluations(tmp_path / "still")[1]["valid_loss_hex"] == last["ema_loss_hex"] != last["valid_loss_hex"]
    capsys.readouterr()
    assert convert.main(["export", "hf", str(tmp_path / "still"), str(tmp_path / "none"), "--ema"]) == 2
    assert "no moving averages" in capsys.readouterr().err


@pytest.mark.slow
def test_averages_begin_with_the_weights_and_may_end(averaged: Path, tmp_path: Path) -> None:
    run_ok(tmp_path / "run", [*BASE, "train.train_iters=4", "schedule.lr_decay_iters=6"])
    run_ok(tmp_path / "run", [*EMA, "checkpoint.save_interval=1"])
    before, after = state(tmp_path / "run", 4), state(tmp_path / "run", 5)
    for name in (name for name in after if name.startswith("ema.")):
        old, new = before[name.removeprefix("ema.")], after[name.removeprefix("ema.")]
        assert torch.equal(after[name], old + (new - old) * (1 - DECAY))
    run_ok(tmp_path / "off", [*BASE, f"checkpoint.load={checkpoint(averaged, 4)}"])
    assert curve(tmp_path / "off") == curve(averaged)[4:]
