"""Where a run begins: what `checkpoint.load` and the flags beside it choose, and what becomes of the rest."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.harness import TINY, all_files, built, call_on_ranks, compose, curve, filled, launch, run_ok, tensor_files
from trainer.launch import process_group as trainer_launch

MODEL = ["model=gpt2_tiny", *TINY]
BASE = [*MODEL, "train.train_iters=8", "schedule.lr_decay_iters=20", "checkpoint.save_interval=2"]


def iteration(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"iter_{number:07d}"


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir())


def damage(path: Path) -> None:
    """Flip one bit of the last byte: in a tensor, past the header."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def optimizer_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in (folder / "optimizer").iterdir() for name, value in load_file(path).items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of eight iterations on one rank, saved every two."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert "starting fresh, seed 1234" in run_ok(folder, BASE).text
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of that run that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def refuse(run: Path, *overrides: str) -> str:
    before = all_files(run)
    ended = launch(run, overrides)
    assert ended.statuses == (1,), ended.text
    assert {**all_files(run), "checkpoints/lock": b""} == {**before, "checkpoints/lock": b""}
    assert "Traceback" not in ended.text
    return ended.text


def test_a_finished_run_started_again_does_nothing_and_says_so(finished: Path) -> None:
    before = all_files(finished)
    ended = run_ok(finished, BASE)
    assert "iteration 8 of 8 is reached, there is nothing to train" in ended.text
    assert "iteration 8 is saved already, nothing to do" in ended.text
    assert all_files(finished) == before


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer", "trainer_state.json", "manifest.json"])
def test_a_damaged_newest_is_skipped_for_the_next_older(run: Path, finished: Path, file: str) -> None:
    path = iteration(run, 8) / file
    path = next(path.iterdir()) if path.is_dir() else path
    damage(path)
    ended = run_ok(run, BASE)
    assert "iter_0000008 is damaged and skipped" in ended.text
    assert path.name in ended.text.split("is damaged and skipped")[1].splitlines()[0]
    assert "iteration 6 from" in ended.text
    assert "a damaged checkpoint is kept as iter_0000008.superseded-1" in ended.text
    assert names(run) == [f"iter_{n:07d}" for n in (2, 4, 6, 8)] + ["iter_0000008.superseded-1"]
    assert curve(run) == curve(finished)
    assert tensor_files(iteration(run, 8)) == tensor_files(iteration(finished, 8))


def test_a_damaged_iteration_that_was_named_is_an_error(run: Path) -> None:
    damage(iteration(run, 8) / "model.safetensors")
    message = refuse(run, *BASE, "checkpoint.ckpt_step=8")
    assert "A tensor is damaged" in message
    assert f"{iteration(run, 8)}/model.safetensors" in message
    assert "A tensor is damaged" in refuse(run, *BASE, f"checkpoint.load={iteration(run, 8)}")


def test_with_every_checkpoint_damaged_nothing_starts(run: Path) -> None:
    for number in (2, 4, 6, 8):
        damage(iteration(run, number) / "trainer_state.json")
    message = refuse(run, *BASE)
    assert "No valid checkpoint is left" in message
    assert all(f"iter_000000{number}" in message for number in (2, 4, 6, 8))
    assert "checkpoint.load=none" in message


def test_a_run_is_named_by_its_own_folder(run: Path, tmp_path: Path) -> None:
    more = [*BASE, "train.train_iters=10", f"checkpoint.load={run}"]
    ended = run_ok(tmp_path / "other", more)
    assert f"iteration 8 from {iteration(run, 8)}" in ended.text
    assert names(tmp_path / "other") == ["iter_0000010"]
    assert "iteration 10 from" in run_ok(tmp_path / "other", more).text  # it goes on from its own
    assert f"iteration 6 from {iteration(run, 6)}" in run_ok(run, [*more, "checkpoint.ckpt_step=6"]).text
    assert names(run)[-2:] == ["iter_0000008.superseded-1", "iter_0000010"]


def test_recorded_saves_alone_are_no_fresh_start(run: Path) -> None:
    for number in (2, 4, 6, 8):
        shutil.rmtree(iteration(run, number))
    message = refuse(run, *BASE)
    assert "recorded saves but no checkpoint is there" in message
    assert "found iteration 8 as the last of them and no iter_ folder" in message
    assert "metrics.jsonl" in message
    assert "checkpoint.load=none" in message


def test_load_none_starts_afresh_and_keeps_what_was_there(run: Path, finished: Path) -> None:
    ended = run_ok(run, [*BASE, "checkpoint.load=none"])
    assert "starting fresh" in ended.text
    kept = [f"iter_{n:07d}" for n in (2, 4, 6, 8)]
    assert names(run) == sorted([*kept, *(f"{name}.superseded-1" for name in kept)])
    assert curve(run) == curve(finished)
    assert (run / "metrics.abandoned-1.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()
    assert tensor_files(iteration(run, 8)) == tensor_files(iteration(finished, 8))


def test_a_path_that_is_not_there_is_no_fresh_start(tmp_path: Path) -> None:
    ended = launch(tmp_path / "run", [*BASE, f"checkpoint.load={tmp_path / 'nowhere'}"])
    assert ended.statuses == (1,)
    assert f"There is no checkpoint folder ({tmp_path / 'nowhere'})" in ended.text
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_folder_without_checkpoints_is_no_fresh_start(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ended = launch(tmp_path / "run", [*BASE, f"checkpoint.load={tmp_path / 'empty'}"])
    assert ended.statuses == (1,)
    assert "A folder holds no checkpoint" in ended.text


@pytest.mark.parametrize("how", ["iteration folder", "checkpoint folder"])
def test_a_path_loads_one_iteration_into_another_run(finished: Path, tmp_path: Path, how: str) -> None:
    load = {
        "iteration folder": [f"checkpoint.load={iteration(finished, 4)}"],
        "checkpoint folder": [f"checkpoint.load={finished / 'checkpoints'}", "checkpoint.ckpt_step=4"],
    }[how]
    before = all_files(finished)
    ended = run_ok(tmp_path / "run", [*BASE, *load])
    assert "iteration 4 from" in ended.text
    assert curve(tmp_path / "run") == curve(finished)[4:]
    assert names(tmp_path / "run") == ["iter_0000006", "iter_0000008"]
    assert tensor_files(iteration(tmp_path / "run", 8)) == tensor_files(iteration(finished, 8))
    assert all_files(finished) == before


def test_a_finished_run_is_saved_again_elsewhere(finished: Path, tmp_path: Path) -> None:
    ended = run_ok(tmp_path / "run", [*BASE, f"checkpoint.load={finished / 'checkpoints'}"])
    assert "nothing to train" in ended.text
    assert names(tmp_path / "run") == ["iter_0000008"]
    assert tensor_files(iteration(tmp_path / "run", 8)) == tensor_files(iteration(finished, 8))


def test_ckpt_step_rewinds_a_run(run: Path, finished: Path) -> None:
    run_ok(run, [*BASE, "checkpoint.ckpt_step=4"])
    kept = [f"iter_{n:07d}" for n in (2, 4, 6, 8)]
    assert names(run) == sorted([*kept, "iter_0000006.superseded-1", "iter_0000008.superseded-1"])
    assert curve(run) == curve(finished)
    abandoned = (run / "metrics.abandoned-1.jsonl").read_text().splitlines()
    assert {json.loads(line)["iteration"] for line in abandoned} == {5, 6, 7, 8}


def test_a_ckpt_step_that_was_never_saved_is_refused(run: Path) -> None:
    message = refuse(run, *BASE, "checkpoint.ckpt_step=5")
    assert "iter_0000005" in message
    assert "one of 2, 4, 6, 8" in message
    assert "checkpoint.ckpt_step" in message


def test_a_ckpt_step_of_a_run_that_saved_nothing_is_refused(tmp_path: Path) -> None:
    ended = launch(tmp_path / "run", [*BASE, "checkpoint.ckpt_step=4"])
    assert ended.statuses == (1,)
    assert f"The requested iteration was never saved ({tmp_path / 'run/checkpoints'})" in ended.text
    assert "checkpoint.ckpt_step" in ended.text


def test_weights_alone_are_saved_and_only_loaded_with_a_flag(tmp_path: Path) -> None:
    source = tmp_path / "weights"
    run_ok(source, [*BASE, "train.train_iters=4", "checkpoint.no_save_optim=true"])
    for number in (2, 4):
        assert list(tensor_files(iteration(source, number))) == ["model.safetensors"]

    refused = refuse(source, *BASE)
    assert "checkpoint.no_load_optim=true" in refused
    assert "checkpoint.finetune=true" in refused

    # A rate of zero leaves the weights as they were loaded.
    frozen = ["optimizer.lr=0.0", "schedule.min_lr=0.0", "schedule.lr_warmup_iters=0"]
    load = f"checkpoint.load={source / 'checkpoints'}"
    run_ok(tmp_path / "tuned", [*BASE, load, "checkpoint.finetune=true", *frozen, "train.train_iters=1"])
    assert [(row[0], row[4]) for row in curve(tmp_path / "tuned")] == [(1, 12)]
    tuned = tensor_files(iteration(tmp_path / "tuned", 1))["model.safetensors"]
    assert tuned == tensor_files(iteration(source, 4))["model.safetensors"]

    run_ok(source, [*BASE, "checkpoint.no_load_optim=true"])
    assert [row[0] for row in curve(source)] == list(range(1, 9))
    assert {float(v) for k, v in optimizer_tensors(iteration(source, 8)).items() if k.startswith("step.")} == {4.0}


def test_no_load_optim_resumes_the_iteration_with_zero_moments(finished: Path, tmp_path: Path) -> None:
    load = [f"checkpoint.load={finished / 'checkpoints'}", "checkpoint.no_load_optim=true"]
    run_ok(tmp_path / "run", [*BASE, *load])
    again = iteration(tmp_path / "run", 8)
    model = "model.safetensors"
    assert (again / model).read_bytes() == (iteration(finished, 8) / model).read_bytes()
    assert all(not value.any() for value in optimizer_tensors(again).values())
    assert any(value.any() for value in optimizer_tensors(iteration(finished, 8)).values())


def test_a_run_that_saves_no_optimizer_still_loads_one(run: Path, finished: Path) -> None:
    run_ok(run, [*BASE, "checkpoint.no_save_optim=true", "checkpoint.ckpt_step=4"])
    assert curve(run) == curve(finished)
    assert list(tensor_files(iteration(run, 8))) == ["model.safetensors"]


def test_a_run_with_optimizer_saves_a_finished_one_without_again(tmp_path: Path) -> None:
    run_ok(tmp_path / "run", [*MODEL, "train.train_iters=3", "checkpoint.no_save_optim=true"])
    run_ok(tmp_path / "run", [*MODEL, "train.train_iters=3", "checkpoint.no_load_optim=true"])
    assert names(tmp_path / "run") == ["iter_0000003", "iter_0000003.superseded-1"]
    assert len(tensor_files(iteration(tmp_path / "run", 3))) == 2


def test_override_scheduler_takes_the_settings_of_the_command(run: Path, finished: Path) -> None:
    changed = ["optimizer.lr=0.002", "optimizer.weight_decay=0.3", "schedule.lr_decay_style=constant"]
    run_ok(run, [*BASE, *changed, "checkpoint.ckpt_step=6", "checkpoint.override_scheduler=true"])
    assert curve(run)[:6] == curve(finished)[:6]
    assert [float.fromhex(row[3]) for row in curve(run)[6:]] == [0.002, 0.002]
    state = json.loads((iteration(run, 8) / "trainer_state.json").read_text())
    assert (state["schedule"]["lr"], state["schedule"]["style"], state["lr"]) == (0.002, "constant", 0.002)
    assert state["adam"]["weight_decay"] == 0.3
    # The seventh step reads the same weights and gradients, and leaves other weights behind.
    assert curve(run)[6][1:3] == curve(finished)[6][1:3]
    assert curve(run)[7][1] != curve(finished)[7][1]


@pytest.mark.parametrize("weight_decay", ["0.3", "0.0"])
def test_use_checkpoint_scheduler_takes_the_saved_settings(run: Path, finished: Path, weight_decay: str) -> None:
    changed = ["optimizer.lr=0.002", f"optimizer.weight_decay={weight_decay}", "optimizer.adam_beta1=0.8"]
    style = "schedule.lr_decay_style=linear"
    run_ok(run, [*BASE, *changed, style, "checkpoint.ckpt_step=4", "checkpoint.use_checkpoint_scheduler=true"])
    assert curve(run) == curve(finished)
    assert tensor_files(iteration(run, 8)) == tensor_files(iteration(finished, 8))
    saved, expected = (
        json.loads((iteration(folder, 8) / "trainer_state.json").read_text()) for folder in (run, finished)
    )
    for key in ("lr", "schedule", "adam", "optimizer"):
        assert saved[key] == expected[key]


def test_a_finished_run_is_extended_on_an_explicit_schedule(run: Path, tmp_path: Path) -> None:
    run_ok(run, [*BASE, "train.train_iters=10"])
    run_ok(tmp_path / "straight", [*BASE, "train.train_iters=10"])
    assert curve(run) == curve(tmp_path / "straight")
    assert tensor_files(iteration(run, 10)) == tensor_files(iteration(tmp_path / "straight", 10))


def test_extending_a_schedule_tied_to_the_run_has_two_remedies(tmp_path: Path) -> None:
    source = tmp_path / "run"
    run_ok(source, [*MODEL, "train.train_iters=4"])
    message = refuse(source, *MODEL, "train.train_iters=6")
    assert re.search(r"train\.train_iters +saved 4  current 6", message)
    assert "schedule.lr_decay_iters=4" in message
    assert "checkpoint.override_scheduler=true" in message

    shutil.copytree(source, tmp_path / "other")
    run_ok(source, [*MODEL, "train.train_iters=6", "schedule.lr_decay_iters=4"])
    assert [float.fromhex(row[3]) for row in curve(source)[3:]] == [1e-4, 1e-4, 1e-4]
    run_ok(tmp_path / "other", [*MODEL, "train.train_iters=6", "checkpoint.override_scheduler=true"])
    rates = [float.fromhex(row[3]) for row in curve(tmp_path / "other")]
    assert rates[3] == 1e-4 < rates[4] < 1e-3
    assert rates[5] == 1e-4


def test_exit_interval_saves_and_exits_and_resumes_bitwise(tmp_path: Path, finished: Path) -> None:
    overrides = [*BASE, "checkpoint.save_interval=0", "train.exit_interval=3"]
    for last in (3, 6, 8):
        run_ok(tmp_path / "run", overrides)
        assert curve(tmp_path / "run") == curve(finished)[:last]
    assert names(tmp_path / "run") == ["iter_0000003", "iter_0000006", "iter_0000008"]
    launches = [json.loads(line) for line in (tmp_path / "run/launches.jsonl").read_text().splitlines()]
    ends = [(launch["outcome"], launch.get("reason", "")) for launch in launches if launch["event"] == "end"]
    assert ends == [("stopped", "train.exit_interval=3")] * 2 + [("finished", "")]
    assert tensor_files(iteration(tmp_path / "run", 8)) == tensor_files(iteration(finished, 8))


def _logits_after_a_forward(arguments: list[str]) -> None:
    """Run a forward pass without gradients, load, and write the logits of rank 0 to the first argument."""
    config = compose(arguments[1:])
    cluster = trainer_launch.start("cpu", deterministic=False)
    run = built(config, cluster)
    windows = run.train_data.train_batch(0, 1)[0][:, :-1]
    with torch.no_grad():
        run.state.parts[0].model(windows)
        run = filled(run)
        logits = run.state.parts[0].model(windows)
    if cluster.rank == 0:
        save_file({"windows": windows.contiguous(), "logits": logits.contiguous()}, arguments[0])
    run.saves.close()
    trainer_launch.shutdown(cluster)


@pytest.mark.parametrize("zero_stage", range(4))
def test_loading_after_a_forward_leaves_nothing_stale(finished: Path, tmp_path: Path, zero_stage: int) -> None:
    overrides = [*BASE, f"run.dir={tmp_path / 'run'}", f"parallel.zero_stage={zero_stage}", "checkpoint.reshard=true"]
    load = f"checkpoint.load={finished / 'checkpoints'}"
    result = tmp_path / "result.safetensors"
    ended = call_on_ranks(_logits_after_a_forward, [str(result), *overrides, load], folder=tmp_path / "run", ranks=2)
    assert ended.ok, ended.text
    found = load_file(result)
    expected = AutoModelForCausalLM.from_pretrained(iteration(finished, 8))(found["windows"]).logits
    # float32 sums in another order, on logits of about 1.
    assert (found["logits"] - expected).abs().max() <= 1e-5
    assert expected.abs().max() > 0.1


def test_a_run_begun_elsewhere_resumes_from_its_own_checkpoints(finished: Path, tmp_path: Path) -> None:
    """The same command resumes a fine-tuning run too: the path says where it began, not where it stands."""
    begin = [*BASE, f"checkpoint.load={finished}/checkpoints", "checkpoint.finetune=true"]
    run_ok(tmp_path / "unbroken", begin)
    first = run_ok(tmp_path / "stopped", [*begin, "train.exit_interval=4"])
    assert "step     1/" in first.text
    again = run_ok(tmp_path / "stopped", begin)
    assert "resumes from its own checkpoints" in again.text
    assert "iteration 4 from" in again.text
    assert curve(tmp_path / "stopped") == curve(tmp_path / "unbroken")


def test_a_run_begun_elsewhere_resumes_without_an_optimizer(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["checkpoint.no_load_optim=true", "checkpoint.no_save_optim=true", "checkpoint.ckpt_step=4"]
    begin = [*BASE, f"checkpoint.load={finished}/checkpoints", *flags]
    run_ok(run, [*begin, "train.train_iters=6"])
    assert "iteration 6 from" in run_ok(run, begin).text
    assert [row[0] for row in curve(run)] == [5, 6, 7, 8]


def test_a_newest_link_stops_the_start_and_its_target_stays(run: Path, tmp_path: Path) -> None:
    elsewhere = Path(shutil.move(iteration(run, 8), tmp_path / "elsewhere"))
    iteration(run, 8).symlink_to(elsewhere)
    (run / "checkpoints/latest_checkpointed_iteration.txt").write_text("6\n")  # else the start mends it
    for _ in range(2):
        message = refuse(run, *BASE)
        assert "The newest iteration of a run is not a folder" in message
        assert f"{iteration(run, 8)}), expected a folder, found a link to {elsewhere}" in message
        for number in (2, 4, 6):  # a link alone is no fresh start either
            shutil.rmtree(iteration(run, number), ignore_errors=True)
        (run / "metrics.jsonl").unlink(missing_ok=True)
    before = all_files(elsewhere)
    run_ok(run, [*BASE, "checkpoint.load=none"])
    assert iteration(run, 8).is_dir()
    assert not iteration(run, 8).is_symlink()
    assert (run / "checkpoints/iter_0000008.superseded-1").is_symlink()
    assert all_files(elsewhere) == before
