"""A checkpoint starts its own run: `checkpoint.load=ITER` in an empty folder needs no other setting."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from reprise.errors import TrainerError
from reprise.storage import FILE_SYSTEM
from tests.harness import TINY, checkpoint, curve, run_ok, state_of, tensor_files
from tests.messages import refused
from tests.resume.starts import REFERENCE, start
from trainer.config.compose import CommandLine, Resolved, over_saved, resolve
from trainer.data.byte_level import bytes_tokenizer


def saved(folder: Path) -> bytes:
    return (folder / "run_config.json").read_bytes()


def config_of(run: Path, number: int) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(saved(checkpoint(run, number)))["config"]
    return config


@pytest.fixture
def alone(reference: Path, tmp_path: Path) -> Path:
    """Return a copy of iteration 4 of the reference run, with nothing beside it."""
    return Path(shutil.copytree(checkpoint(reference, 4), tmp_path / "given" / "iter_0000004"))


def test_an_iteration_has_these_files_and_no_others(reference: Path) -> None:
    files = sorted(str(path.relative_to(checkpoint(reference, 4))) for path in checkpoint(reference, 4).rglob("*.*"))
    assert files == [
        "config.json",
        "generation_config.json",
        "manifest.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "optimizer/optimizer-00001-of-00001.safetensors",
        "run_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "trainer_state.json",
    ]
    assert not (reference / "checkpoints/weights").exists()


def test_one_iteration_folder_continues_the_run(reference: Path, alone: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert f"{alone}/run_config.json," in run_ok(run, [f"checkpoint.load={alone}"]).text
    assert curve(run) == curve(reference)[4:]
    ours, theirs = checkpoint(run, 8), checkpoint(reference, 8)
    assert tensor_files(ours) == tensor_files(theirs)
    assert saved(ours) == saved(theirs)
    assert state_of(ours) == state_of(theirs)
    # One key goes over it, and the schedule stays; the same command goes on without the folder.
    shutil.rmtree(alone)
    assert "iteration 8 from" in run_ok(run, [f"checkpoint.load={alone}", "train.train_iters=9"]).text
    assert [row[0] for row in curve(run)] == list(range(5, 10))
    assert config_of(run, 9)["train"]["train_iters"] == 9
    assert config_of(run, 9)["schedule"] == config_of(run, 8)["schedule"]


def resolved(*words: str) -> Resolved:
    """Return the configuration of a command."""
    return resolve(over_saved(CommandLine(words), FILE_SYSTEM))


@pytest.mark.parametrize("group", ["model=gpt2_tiny", "experiment=demo"])
def test_a_command_that_names_a_model_is_whole(monkeypatch: pytest.MonkeyPatch, alone: Path, group: str) -> None:
    own, whole = (resolved(f"checkpoint.load={alone}", *words).config for words in ([], [group]))
    assert (own.model.n_layer, own.train.train_iters) == (2, 8)
    assert whole.model.n_layer != 2


def test_another_group_takes_the_place_of_its_section(
    monkeypatch: pytest.MonkeyPatch, alone: Path, tmp_path: Path
) -> None:
    load = f"checkpoint.load={alone}"
    constant = resolved(load, "schedule=constant", "checkpoint.override_scheduler=true").config
    assert constant.schedule.lr_decay_style.value == "constant"
    assert constant.optimizer.lr == 0.001
    with refused(TrainerError, "optimizer", "AdamW", "Muon"):
        start(tmp_path / "run", *REFERENCE, load, "optimizer=muon")


def test_a_schedule_taken_from_the_checkpoint_is_carried_on(alone: Path, tmp_path: Path) -> None:
    more = ["schedule=constant", "checkpoint.use_checkpoint_scheduler=true", "optimizer.weight_decay=0.5"]
    run_ok(tmp_path / "run", [f"checkpoint.load={alone}", *more, "train.exit_interval=5"])
    config, given = config_of(tmp_path / "run", 5), json.loads(saved(alone))["config"]
    assert config["schedule"] == given["schedule"]
    assert config["optimizer"] == given["optimizer"]
    own = resolved(f"run.dir={tmp_path / 'run'}", "model=gpt2_124m", *more).config  # also from a run's own checkpoint
    assert (own.optimizer.weight_decay, own.model.n_layer) == (given["optimizer"]["weight_decay"], 12)
    assert own.schedule.lr_decay_style.value == given["schedule"]["lr_decay_style"]
    local = ["checkpoint.save=null", f"checkpoint.local.dir={tmp_path / 'run/checkpoints'}"]
    assert resolved("model=gpt2_124m", *local, *more).config.optimizer == own.optimizer
    new = resolved(f"run.dir={tmp_path / 'new'}", "model=gpt2_124m", *more).config
    assert new.optimizer.weight_decay == 0.5


def test_a_value_of_the_environment_is_not_written(tmp_path: Path) -> None:
    overrides = ["model=gpt2_tiny", *TINY, "train.train_iters=1", "schedule.lr_warmup_iters=0"]
    run_ok(tmp_path / "run", [*overrides, "train.device=${oc.env:REPRISE_DEVICE,cpu}"])
    assert "device" not in config_of(tmp_path / "run", 1)["train"]


@pytest.mark.slow
def test_its_own_tokenizer_takes_the_place_of_a_lost_one(reference: Path, tmp_path: Path) -> None:
    lost, run, text = tmp_path / "tokenizer.json", tmp_path / "run", tmp_path / "text.txt"
    shutil.copyfile(checkpoint(reference, 4) / "tokenizer.json", lost)
    text.write_text("A run takes what it needs along.\n" * 400)
    data = ["data=text", f"data.path={text}", f"data.tokenizer={lost}", f"data.cache={tmp_path / 'cache'}"]
    run_ok(run, ["model=gpt2_tiny", *TINY, *data, "train.train_iters=4"])
    lost.unlink()
    run_ok(tmp_path / "new", [f"checkpoint.load={checkpoint(run, 4)}", "train.train_iters=5", data[-1]])
    assert config_of(tmp_path / "new", 5)["data"]["tokenizer"] == str(checkpoint(run, 4) / "tokenizer.json")
    run_ok(tmp_path / "stored", [f"checkpoint.load=file://{checkpoint(run, 4)}", "train.train_iters=5", data[-1]])
    stored = f"file://{checkpoint(run, 4)}/tokenizer.json"
    assert config_of(tmp_path / "stored", 5)["data"]["tokenizer"] == stored
    assert (checkpoint(tmp_path / "stored", 5) / "tokenizer.json").read_bytes() == bytes_tokenizer()


def test_a_damaged_one_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, alone: Path) -> None:
    path = alone / "run_config.json"
    path.write_bytes(path.read_bytes().replace(b'"n_layer": 2', b'"n_layer": 3'))
    with refused(TrainerError, str(path)):
        resolved(f"checkpoint.load={alone}")
