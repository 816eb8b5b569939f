"""A checkpoint starts its own run: `checkpoint.load=ITER` in an empty folder needs no other setting."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.harness import TINY, curve, launch, run_ok, state_of, tensor_files

STRAIGHT = [*TINY, "model.dropout=0.1", "train.train_iters=8", "checkpoint.save_interval=4", "optimizer.lr=0.002"]


def iteration(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"iter_{number:07d}"


def saved(folder: Path) -> bytes:
    return (folder / "run_config.json").read_bytes()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of eight iterations on one rank, saved every four."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    run_ok(folder, ["model=gpt2_tiny", *STRAIGHT])
    return folder


@pytest.fixture
def alone(straight: Path, tmp_path: Path) -> Path:
    """Return a copy of its iteration 4, with nothing beside it."""
    return Path(shutil.copytree(iteration(straight, 4), tmp_path / "given" / "iter_0000004"))


def test_an_iteration_has_these_files_and_no_others(straight: Path) -> None:
    files = sorted(str(path.relative_to(iteration(straight, 4))) for path in iteration(straight, 4).rglob("*.*"))
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
    assert not (straight / "checkpoints/weights").exists()


def test_one_iteration_folder_continues_the_run(straight: Path, alone: Path, tmp_path: Path) -> None:
    ended = run_ok(tmp_path / "run", [f"checkpoint.load={alone}"])
    assert f"the configuration is that of {alone}/run_config.json," in ended.text
    assert curve(tmp_path / "run") == curve(straight)[4:]
    ours, theirs = iteration(tmp_path / "run", 8), iteration(straight, 8)
    assert tensor_files(ours) == tensor_files(theirs)
    assert saved(ours) == saved(theirs)
    assert state_of(ours) == state_of(theirs)


@pytest.mark.slow
def test_two_tensor_parallel_ranks_continue_theirs(straight: Path, tmp_path: Path) -> None:
    overrides = ["model=gpt2_tiny", *STRAIGHT, "parallel=tp2"]
    run_ok(tmp_path / "straight", overrides, ranks=2)
    given = Path(shutil.copytree(iteration(tmp_path / "straight", 4), tmp_path / "given/iter_0000004"))
    assert saved(given) == saved(iteration(straight, 4))  # whatever the topology, and the folder
    run_ok(tmp_path / "run", [f"checkpoint.load={given}"], ranks=2)
    assert curve(tmp_path / "run") == curve(tmp_path / "straight")[4:]
    assert tensor_files(iteration(tmp_path / "run", 8)) == tensor_files(iteration(tmp_path / "straight", 8))


def test_one_key_goes_over_it_and_the_schedule_stays(straight: Path, alone: Path, tmp_path: Path) -> None:
    more = [f"checkpoint.load={alone}", "train.train_iters=10"]
    run_ok(tmp_path / "run", more)
    assert curve(tmp_path / "run")[:4] == curve(straight)[4:]
    assert json.loads(saved(iteration(tmp_path / "run", 10)))["config"]["train"]["train_iters"] == 10
    shutil.rmtree(alone)  # the same command goes on from its own checkpoints
    ended = run_ok(tmp_path / "run", [*more, "train.train_iters=11"])
    assert "iteration 10 from" in ended.text
    assert [row[0] for row in curve(tmp_path / "run")] == list(range(5, 12))


def test_a_command_that_names_a_model_is_whole(alone: Path, tmp_path: Path) -> None:
    for group in ("model=gpt2_tiny", "experiment=demo", "--config-name=train"):
        ended = launch(tmp_path / "run", [f"checkpoint.load={alone}", group])
        assert ended.statuses == (1,)
        assert "run_config.json" not in ended.text
        assert "model.n_layer" in ended.text


def test_another_group_takes_the_place_of_its_section(alone: Path, tmp_path: Path) -> None:
    ended = launch(tmp_path / "run", [f"checkpoint.load={alone}", "optimizer=muon", "optimizer.lr=0.003"])
    assert ended.statuses == (1,)
    assert "saved AdamW  current Muon" in ended.text
    run_ok(tmp_path / "run", [f"checkpoint.load={alone}", "schedule=constant", "checkpoint.override_scheduler=true"])
    assert {row[3] for row in curve(tmp_path / "run")} == {(0.002).hex()}


def test_a_new_run_begins_from_its_weights(alone: Path, tmp_path: Path) -> None:
    more = [f"checkpoint.load={alone}", "checkpoint.finetune=true", "train.train_iters=2", "schedule.lr_warmup_iters=1"]
    assert "iteration 4 from" in run_ok(tmp_path / "run", more).text
    assert [row[0] for row in curve(tmp_path / "run")] == [1, 2]


def test_a_schedule_taken_from_the_checkpoint_is_carried_on(alone: Path, tmp_path: Path) -> None:
    more = ["schedule=constant", "checkpoint.use_checkpoint_scheduler=true", "optimizer.weight_decay=0.5"]
    run_ok(tmp_path / "run", [f"checkpoint.load={alone}", *more])
    found, given = (json.loads(saved(path))["config"] for path in (iteration(tmp_path / "run", 8), alone))
    assert found["schedule"] == given["schedule"]
    assert found["optimizer"] == given["optimizer"]


def test_a_value_of_the_environment_is_not_written(tmp_path: Path) -> None:
    overrides = ["model=gpt2_tiny", *TINY, "train.train_iters=1", "schedule.lr_warmup_iters=0"]
    run_ok(tmp_path / "run", [*overrides, "train.sample_prompt=${oc.env:PATH}"])
    found = json.loads(saved(iteration(tmp_path / "run", 1)))
    assert "sample_prompt" not in found["config"]["train"]


def test_its_own_tokenizer_takes_the_place_of_a_lost_one(straight: Path, tmp_path: Path) -> None:
    lost, run, text = tmp_path / "tokenizer.json", tmp_path / "run", tmp_path / "text.txt"
    shutil.copyfile(iteration(straight, 4) / "tokenizer.json", lost)
    text.write_text("A run takes what it needs along.\n" * 400)
    data = ["data=text", f"data.path={text}", f"data.tokenizer={lost}", f"data.cache={tmp_path / 'cache'}"]
    run_ok(run, ["model=gpt2_tiny", *TINY, *data, "train.train_iters=4"])
    lost.unlink()
    run_ok(tmp_path / "new", [f"checkpoint.load={iteration(run, 4)}", "train.train_iters=5", data[-1]])
    taken = json.loads(saved(iteration(tmp_path / "new", 5)))["config"]["data"]["tokenizer"]
    assert taken == str(iteration(run, 4) / "tokenizer.json")
    run_ok(tmp_path / "stored", [f"checkpoint.load=file://{iteration(run, 4)}", "train.train_iters=5", data[-1]])
    taken = json.loads(saved(iteration(tmp_path / "stored", 5)))["config"]["data"]["tokenizer"]
    assert Path(taken).parent == tmp_path / "stored"
    assert Path(taken).read_bytes() == (iteration(run, 4) / "tokenizer.json").read_bytes()


def test_a_damaged_one_is_refused_by_name(alone: Path, tmp_path: Path) -> None:
    path = alone / "run_config.json"
    path.write_bytes(path.read_bytes().replace(b'"n_layer": 2', b'"n_layer": 3'))
    ended = launch(tmp_path / "run", [f"checkpoint.load={alone}"])
    assert ended.statuses == (1,)
    assert f"A file is damaged ({path})" in ended.text
