"""Saves of the weights alone, on a schedule of their own: `checkpoint.save_weights_interval` and `save_steps`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.harness import TINY, all_files, curve, launch, run_ok, state_of, tensor_files
from trainer.commands import checkpoint as command

BASE = ["model=gpt2_tiny", *TINY, "model.dropout=0.1", "train.train_iters=6", "checkpoint.save_interval=4"]
LIGHT = [*BASE, "checkpoint.save_steps=[0,1,5]", "checkpoint.save_weights_interval=2"]
DUE = (0, 1, 2, 4, 5, 6)


def weights(run: Path, iteration: int) -> Path:
    return run / "checkpoints" / "weights" / f"iter_{iteration:07d}"


def full(run: Path, iteration: int) -> Path:
    return run / "checkpoints" / f"iter_{iteration:07d}"


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints" / "weights").iterdir() if path.is_dir())


def names(iterations: tuple[int, ...] | list[int]) -> list[str]:
    return [f"iter_{iteration:07d}" for iteration in iterations]


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of six iterations on one rank with light saves."""
    folder = tmp_path_factory.mktemp("light") / "run"
    run_ok(folder, LIGHT)
    return folder


@pytest.fixture
def run(light: Path, tmp_path: Path) -> Path:
    """Return a copy of that run that a test may change."""
    return Path(shutil.copytree(light, tmp_path / "run"))


def test_training_is_that_of_a_run_without_them(light: Path, tmp_path: Path) -> None:
    run_ok(tmp_path / "plain", BASE)
    assert curve(light) == curve(tmp_path / "plain")
    for iteration in (4, 6):
        assert tensor_files(full(light, iteration)) == tensor_files(full(tmp_path / "plain", iteration))
        assert state_of(full(light, iteration)) == state_of(full(tmp_path / "plain", iteration))
    assert not (tmp_path / "plain/checkpoints/weights").exists()


def test_they_are_the_weights_rounded_and_open_in_transformers(light: Path) -> None:
    assert saved(light) == names(DUE)
    for iteration in (4, 6):
        exact = load_file(full(light, iteration) / "model.safetensors")
        rounded = load_file(weights(light, iteration) / "model.safetensors")
        assert rounded.keys() == exact.keys()
        assert all(torch.equal(rounded[name], exact[name].to(torch.bfloat16)) for name in exact)
    assert not (weights(light, 4) / "optimizer").exists()
    theirs, report = AutoModelForCausalLM.from_pretrained(weights(light, 4), output_loading_info=True)
    assert theirs.dtype == torch.bfloat16
    assert not any(report.values())


def test_a_new_run_begins_from_them_and_none_continues(light: Path, tmp_path: Path) -> None:
    load = f"checkpoint.load={weights(light, 5)}"
    ended = launch(tmp_path / "refused", [*BASE, load])
    assert ended.statuses == (1,)
    assert "or as weights alone" in ended.text
    again = ["train.train_iters=1", "schedule.lr_warmup_iters=1", "checkpoint.save_steps=[0]"]
    ended = run_ok(
        tmp_path / "new", [*BASE, load, "checkpoint.finetune=true", *again, "checkpoint.weights_dtype=float32"]
    )
    assert "cast to float32 from bfloat16" in ended.text
    found = load_file(weights(tmp_path / "new", 0) / "model.safetensors")
    given = load_file(weights(light, 5) / "model.safetensors")
    assert all(torch.equal(found[name], given[name].float()) for name in given)
    assert all(value.dtype == torch.float32 for value in found.values())


def test_a_resume_looks_past_them_and_makes_them_again(run: Path, light: Path) -> None:
    shutil.rmtree(full(run, 6))
    ended = run_ok(run, LIGHT)
    assert "iteration 4 from" in ended.text
    assert saved(run) == sorted([*names(DUE), "iter_0000005.superseded-1", "iter_0000006.superseded-1"])
    for iteration in DUE:
        assert tensor_files(weights(run, iteration)) == tensor_files(weights(light, iteration))


def test_a_kill_between_a_checkpoint_and_its_weights_is_mended(run: Path, light: Path) -> None:
    before = all_files(weights(run, 2))
    shutil.rmtree(full(run, 6))
    for iteration in (4, 5, 6):
        shutil.rmtree(weights(run, iteration))
    run_ok(run, LIGHT)
    assert saved(run) == names(DUE)
    assert tensor_files(weights(run, 4)) == tensor_files(weights(light, 4))
    assert all_files(weights(run, 2)) == before


def test_leftovers_are_swept_by_a_run_without_light_saves(run: Path) -> None:
    left = weights(run, 3).with_name(".iter_0000003.dead-1.partial")
    left.mkdir()
    shutil.rmtree(full(run, 6))
    run_ok(run, BASE)
    assert not left.exists()
    assert saved(run) == [*names([0, 1, 2, 4]), "iter_0000005.superseded-1", "iter_0000006.superseded-1"]


def test_their_retention_keeps_the_steps(tmp_path: Path) -> None:
    run_ok(tmp_path / "run", [*LIGHT, "checkpoint.save_weights_interval=1", "checkpoint.weights_keep=2"])
    assert saved(tmp_path / "run") == names([0, 1, 5, 6])
    assert (tmp_path / "run/checkpoints/iter_0000004").is_dir()


def test_ls_and_verify_name_them_after_the_checkpoints(light: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = [*names([4, 6]), *(f"weights/{name}" for name in names(DUE))]
    assert command.main(["ls", "--json", str(light)]) == 0
    assert [row["checkpoint"] for row in json.loads(capsys.readouterr().out)] == expected
    assert command.main(["verify", "--json", str(light)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["checkpoint"], row["result"]) for row in rows] == [(name, "whole") for name in expected]
    assert command.main(["show", "--json", str(weights(light, 1))]) == 0
    assert {row["dtype"] for row in json.loads(capsys.readouterr().out)["tensors"]} == {"BF16"}


def test_a_finished_run_started_again_adds_nothing(light: Path) -> None:
    before = all_files(light)
    run_ok(light, LIGHT)
    assert all_files(light) == before


@pytest.mark.slow
@pytest.mark.parametrize("layout", [["parallel.zero_stage=3"], ["parallel=tp2"]], ids=["zero3", "tp2"])
def test_two_ranks_write_the_bytes_of_one(light: Path, tmp_path: Path, layout: list[str]) -> None:
    run_ok(tmp_path / "run", [*LIGHT, *layout, "train.train_iters=4", "schedule.lr_decay_iters=6"], ranks=2)
    assert saved(tmp_path / "run") == names([0, 1, 2, 4])
    assert tensor_files(weights(tmp_path / "run", 0)) == tensor_files(weights(light, 0))
    exact = load_file(full(tmp_path / "run", 4) / "model.safetensors")
    rounded = load_file(weights(tmp_path / "run", 4) / "model.safetensors")
    assert all(torch.equal(rounded[name], exact[name].to(torch.bfloat16)) for name in exact)
