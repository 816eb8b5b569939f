"""Saves of the weights alone, on a schedule of their own: `checkpoint.save_weights_interval` and `save_steps`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from reprise.errors import TrainerError
from tests.harness import all_files, checkpoint, curve, run_ok, state_of, tensor_files
from tests.messages import refused
from tests.resume.starts import REFERENCE, start
from trainer.commands import checkpoint as command

LIGHT = [*REFERENCE, "checkpoint.save_steps=[0,1,7]", "checkpoint.save_weights_interval=4"]
DUE = (0, 1, 4, 7, 8)


def weights(run: Path, number: int) -> Path:
    return checkpoint(run, number).parent / "weights" / f"iter_{number:07d}"


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints" / "weights").iterdir() if path.is_dir())


def names(iterations: Sequence[int]) -> list[str]:
    return [f"iter_{number:07d}" for number in iterations]


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the reference run with light saves."""
    folder = tmp_path_factory.mktemp("light") / "run"
    run_ok(folder, LIGHT)
    return folder


@pytest.fixture
def run(light: Path, tmp_path: Path) -> Path:
    """Return a copy of that run that a test may change."""
    return Path(shutil.copytree(light, tmp_path / "run"))


def test_training_is_that_of_a_run_without_them(light: Path, reference: Path) -> None:
    assert curve(light) == curve(reference)
    for number in (4, 8):
        assert tensor_files(checkpoint(light, number)) == tensor_files(checkpoint(reference, number))
        assert state_of(checkpoint(light, number)) == state_of(checkpoint(reference, number))


def test_they_are_the_weights_rounded_and_open_in_transformers(light: Path) -> None:
    assert saved(light) == names(DUE)
    for number in (4, 8):
        exact = load_file(checkpoint(light, number) / "model.safetensors")
        rounded = load_file(weights(light, number) / "model.safetensors")
        assert rounded.keys() == exact.keys()
        assert all(torch.equal(rounded[name], exact[name].to(torch.bfloat16)) for name in exact)
    assert not (weights(light, 4) / "optimizer").exists()
    theirs, report = AutoModelForCausalLM.from_pretrained(weights(light, 4), output_loading_info=True)
    assert theirs.dtype == torch.bfloat16
    assert not any(report.values())


def test_a_new_run_begins_from_them_and_none_continues(run: Path, tmp_path: Path) -> None:
    load = f"checkpoint.load={weights(run, 7)}"
    with refused(TrainerError, "iter_0000007", "checkpoint.finetune=true"):
        start(tmp_path / "refused", *REFERENCE, load)
    begun = start(tmp_path / "new", *REFERENCE, load, "checkpoint.finetune=true")
    shards = {shard.spec.name: shard.local for shard in begun.state.shards()}
    for name, value in load_file(weights(run, 7) / "model.safetensors").items():
        assert shards[name].dtype == torch.float32
        assert torch.equal(shards[name].reshape(value.shape), value.float())


def test_a_resume_looks_past_them_and_makes_them_again(run: Path, light: Path) -> None:
    for number in (6, 8):
        shutil.rmtree(checkpoint(run, number))
    shutil.rmtree(weights(run, 4))  # as a kill between a checkpoint and its weights leaves it
    before = all_files(weights(run, 1))
    assert "iteration 4 from" in run_ok(run, LIGHT).text
    assert saved(run) == sorted([*names(DUE), "iter_0000007.superseded-1", "iter_0000008.superseded-1"])
    assert all(tensor_files(weights(run, number)) == tensor_files(weights(light, number)) for number in DUE)
    assert all_files(weights(run, 1)) == before


def test_leftovers_are_swept_by_a_run_without_light_saves(run: Path) -> None:
    left = weights(run, 3).with_name(".iter_0000003.dead-1.partial")
    left.mkdir()
    shutil.rmtree(checkpoint(run, 8))
    run_ok(run, REFERENCE)
    assert not left.exists()
    assert saved(run) == [*names([0, 1, 4]), "iter_0000007.superseded-1", "iter_0000008.superseded-1"]


def test_ls_and_verify_name_them_after_the_checkpoints(light: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = [*names([2, 4, 6, 8]), *(f"weights/{name}" for name in names(DUE))]
    assert command.main(["ls", "--json", str(light)]) == 0
    assert [row["checkpoint"] for row in json.loads(capsys.readouterr().out)] == expected
    assert command.main(["verify", "--json", str(light)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["checkpoint"], row["result"]) for row in rows] == [(name, "whole") for name in expected]
    assert command.main(["show", "--json", str(weights(light, 1))]) == 0
    assert {row["dtype"] for row in json.loads(capsys.readouterr().out)["tensors"]} == {"BF16"}
