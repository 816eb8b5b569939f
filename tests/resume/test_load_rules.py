"""Where a run begins: what `checkpoint.load` and the flags beside it choose, and what becomes of the rest."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reprise.errors import TrainerError
from tests.harness import (
    TINY,
    all_files,
    checkpoint,
    curve,
    run_ok,
    tensor_files,
)
from tests.messages import refused
from tests.resume.starts import REFERENCE, start
from trainer.run.build import Run

MODEL = ["model=gpt2_tiny", *TINY]
SAVED = (2, 4, 6, 8)
KEPT = [f"iter_{number:07d}" for number in SAVED]


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir())


def damage(path: Path) -> None:
    """Flip one bit of the last byte: in a tensor, past the header."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def optimizer_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in (folder / "optimizer").iterdir() for name, value in load_file(path).items()}


def refuse(run: Path, *overrides: str, names: Sequence[str]) -> None:
    """Check that a command is refused by an error that names these, and changes no file."""
    before = {**all_files(run), "checkpoints/lock": b""}
    with refused(TrainerError, *names):
        start(run, *REFERENCE, *overrides)
    assert {**all_files(run), "checkpoints/lock": b""} == before


def assert_is_whole(run: Path, reference: Path) -> None:
    """Check that a run has the curve of the reference, and the bytes of its end."""
    assert curve(run) == curve(reference)
    ours, theirs = (tensor_files(checkpoint(folder, 8)) for folder in (run, reference))
    assert all(ours[name] == theirs[name] for name in ours)


@pytest.fixture(autouse=True)
def level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_a_finished_run_started_again_does_nothing_and_says_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_ok(run, REFERENCE)
    before = all_files(run)
    ended = run_ok(run, REFERENCE)
    assert "iteration 8 of 8 is reached" in ended.text
    assert "iteration 8 needs no new save" in ended.text
    after = all_files(run)
    # A start in the second of the one before renames the event file of that, for TensorBoard's order.
    assert sorted(after.values()) == sorted(before.values())
    assert {name for name in after.keys() ^ before.keys() if not name.startswith("tensorboard/")} == set()


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer", "trainer_state.json", "manifest.json"])
def test_a_damaged_newest_is_skipped_for_the_next_older(run: Path, caplog: pytest.LogCaptureFixture, file: str) -> None:
    path = checkpoint(run, 8) / file
    path = next(path.iterdir()) if path.is_dir() else path
    damage(path)
    assert start(run, *REFERENCE, "model.initializer_range=0.03").state.progress.iteration == 6
    assert path.name in caplog.text.split("iter_0000008 is skipped")[1].splitlines()[0]
    assert caplog.text.count("model.initializer_range") == 1  # a difference to the loaded checkpoint, not to each


def test_a_damaged_checkpoint_is_kept_when_it_is_saved_again(run: Path, reference: Path) -> None:
    damage(checkpoint(run, 8) / "model.safetensors")
    assert "is kept as iter_0000008.superseded-1" in run_ok(run, REFERENCE).text
    assert names(run) == [*KEPT, "iter_0000008.superseded-1"]
    assert_is_whole(run, reference)


def test_a_damaged_iteration_that_was_named_is_an_error(run: Path) -> None:
    path = checkpoint(run, 8) / "model.safetensors"
    damage(path)
    for named in ("checkpoint.ckpt_step=8", f"checkpoint.load={checkpoint(run, 8)}"):
        refuse(run, named, names=[str(path)])


def test_with_every_checkpoint_damaged_nothing_starts(run: Path) -> None:
    for number in SAVED:
        damage(checkpoint(run, number) / "trainer_state.json")
    refuse(run, names=[*KEPT, "checkpoint.load=none"])


def test_a_run_is_named_by_its_own_folder(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = [*REFERENCE, "train.train_iters=10", f"checkpoint.load={run}"]
    ended = run_ok(tmp_path / "other", more)
    assert f"iteration 8 from {checkpoint(run, 8)}" in ended.text
    assert names(tmp_path / "other") == ["iter_0000010"]
    assert start(tmp_path / "other", *more).state.progress.iteration == 10  # it goes on from its own
    assert start(run, *more, "checkpoint.ckpt_step=6").state.progress.iteration == 6
    assert f"iteration 6 from {checkpoint(run, 6)}" in caplog.text


def test_recorded_saves_alone_are_no_fresh_start(run: Path) -> None:
    for number in SAVED:
        shutil.rmtree(checkpoint(run, number))
    refuse(run, names=["iteration 8", str(run), "checkpoint.load=none"])


def test_load_none_starts_afresh_and_keeps_what_was_there(run: Path, reference: Path) -> None:
    ended = run_ok(run, [*REFERENCE, "checkpoint.load=none"])
    assert "starting fresh, seed 1234" in ended.text
    aside = f"sets aside {len(KEPT)} checkpoints of this run, the newest of iteration {SAVED[-1]}: they become iter_"
    assert aside in ended.text
    assert "run.name=default-2" in ended.text
    assert names(run) == sorted([*KEPT, *(f"{name}.superseded-1" for name in KEPT)])
    assert (run / "metrics.abandoned-1.jsonl").read_bytes() == (reference / "metrics.jsonl").read_bytes()
    assert_is_whole(run, reference)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_folder_without_checkpoints_is_no_fresh_start(tmp_path: Path, is_there: bool) -> None:
    folder = tmp_path / "nowhere"
    if is_there:
        folder.mkdir()
    refuse(tmp_path / "run", f"checkpoint.load={folder}", names=[str(folder)])
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.parametrize("how", ["iteration folder", "checkpoint folder"])
def test_a_path_loads_one_iteration_into_another_run(reference: Path, tmp_path: Path, how: str) -> None:
    load = {
        "iteration folder": [f"checkpoint.load={checkpoint(reference, 4)}"],
        "checkpoint folder": [f"checkpoint.load={reference / 'checkpoints'}", "checkpoint.ckpt_step=4"],
    }[how]
    before = all_files(reference)
    run = start(tmp_path / "run", *REFERENCE, *load)
    assert run.state.progress.iteration == 4
    assert_has_weights(run, checkpoint(reference, 4))
    assert all_files(reference) == before


def assert_has_weights(run: Run, folder: Path) -> None:
    """Check that a run that has started holds the weights of a checkpoint."""
    weights = load_file(folder / "model.safetensors")
    shards = {shard.spec.name: shard.local for shard in run.state.shards()}
    assert all(torch.equal(shards[name].view(value.shape), value) for name, value in weights.items())


def test_a_finished_run_is_saved_again_elsewhere(reference: Path, tmp_path: Path) -> None:
    run_ok(tmp_path / "run", [*REFERENCE, f"checkpoint.load={reference / 'checkpoints'}"])
    assert names(tmp_path / "run") == ["iter_0000008"]
    assert tensor_files(checkpoint(tmp_path / "run", 8)) == tensor_files(checkpoint(reference, 8))


def test_ckpt_step_rewinds_a_run(run: Path, reference: Path) -> None:
    """And a run that saves no optimizer still loads one."""
    run_ok(run, [*REFERENCE, "checkpoint.ckpt_step=4", "checkpoint.no_save_optim=true"])
    assert names(run) == sorted([*KEPT, "iter_0000006.superseded-1", "iter_0000008.superseded-1"])
    abandoned = (run / "metrics.abandoned-1.jsonl").read_text().splitlines()
    assert {json.loads(line)["iteration"] for line in abandoned} == {5, 6, 7, 8}
    assert list(tensor_files(checkpoint(run, 8))) == ["model.safetensors"]
    assert_is_whole(run, reference)


def test_a_ckpt_step_that_was_never_saved_is_refused(run: Path, tmp_path: Path) -> None:
    refuse(run, "checkpoint.ckpt_step=5", names=["iter_0000005", "2, 4, 6, 8", "checkpoint.ckpt_step"])
    refuse(tmp_path / "new", "checkpoint.ckpt_step=4", names=["new/checkpoints", "checkpoint.ckpt_step"])


def test_weights_alone_are_saved_and_only_loaded_with_a_flag(tmp_path: Path) -> None:
    source = tmp_path / "weights"
    run_ok(source, [*REFERENCE, "train.train_iters=4", "checkpoint.no_save_optim=true"])
    for number in (2, 4):
        assert list(tensor_files(checkpoint(source, number))) == ["model.safetensors"]
    refuse(source, names=["checkpoint.no_load_optim=true", "checkpoint.finetune=true"])
    load = f"checkpoint.load={source / 'checkpoints'}"
    for flag, at in (("finetune", 0), ("no_load_optim", 4)):
        run = start(tmp_path / flag, *REFERENCE, load, f"checkpoint.{flag}=true")
        assert run.state.progress.iteration == at
        assert_has_weights(run, checkpoint(source, 4))


def test_no_load_optim_resumes_the_iteration_with_zero_moments(reference: Path, tmp_path: Path) -> None:
    load = [f"checkpoint.load={reference / 'checkpoints'}", "checkpoint.no_load_optim=true"]
    run_ok(tmp_path / "run", [*REFERENCE, *load])
    again = checkpoint(tmp_path / "run", 8)
    assert (again / "model.safetensors").read_bytes() == (checkpoint(reference, 8) / "model.safetensors").read_bytes()
    assert not any(value.any() for value in optimizer_tensors(again).values())
    assert any(value.any() for value in optimizer_tensors(checkpoint(reference, 8)).values())


def test_override_scheduler_takes_the_settings_of_the_command(run: Path, reference: Path) -> None:
    changed = ["optimizer.lr=0.002", "optimizer.weight_decay=0.3", "schedule.lr_decay_style=constant"]
    run_ok(run, [*REFERENCE, *changed, "checkpoint.ckpt_step=6", "checkpoint.override_scheduler=true"])
    assert curve(run)[:6] == curve(reference)[:6]
    assert [float.fromhex(row[3]) for row in curve(run)[6:]] == [0.002, 0.002]
    state = json.loads((checkpoint(run, 8) / "trainer_state.json").read_text())
    assert (state["schedule"]["lr"], state["schedule"]["style"], state["lr"]) == (0.002, "constant", 0.002)
    assert state["adam"]["weight_decay"] == 0.3
    # The seventh step reads the same weights and gradients, and leaves other weights behind.
    assert curve(run)[6][1:3] == curve(reference)[6][1:3]
    assert curve(run)[7][1] != curve(reference)[7][1]


@pytest.mark.parametrize("weight_decay", ["0.3", pytest.param("0.0", marks=pytest.mark.slow)])
def test_use_checkpoint_scheduler_takes_the_saved_settings(run: Path, reference: Path, weight_decay: str) -> None:
    changed = ["optimizer.lr=0.002", f"optimizer.weight_decay={weight_decay}", "optimizer.adam_beta1=0.8"]
    style = "schedule.lr_decay_style=linear"
    run_ok(run, [*REFERENCE, *changed, style, "checkpoint.ckpt_step=4", "checkpoint.use_checkpoint_scheduler=true"])
    assert_is_whole(run, reference)
    saved, expected = (
        json.loads((checkpoint(folder, 8) / "trainer_state.json").read_text()) for folder in (run, reference)
    )
    assert all(saved[key] == expected[key] for key in ("lr", "schedule", "adam", "optimizer"))


@pytest.mark.parametrize(
    ("flags", "at"),
    [
        (["checkpoint.finetune=true", "train.exit_interval=2"], 2),
        (["checkpoint.no_load_optim=true", "checkpoint.no_save_optim=true", "checkpoint.ckpt_step=4"], 8),
    ],
)
def test_a_run_begun_elsewhere_resumes_from_its_own_checkpoints(
    reference: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: list[str], at: int
) -> None:
    """The same command resumes it: the path says where it began, not where it stands."""
    begin = [*REFERENCE, f"checkpoint.load={reference}/checkpoints", *flags]
    run_ok(tmp_path / "run", begin)
    assert start(tmp_path / "run", *begin).state.progress.iteration == at
    assert "resumes from its own checkpoints" in caplog.text


def test_a_newest_link_stops_the_start_and_its_target_stays(run: Path, tmp_path: Path) -> None:
    elsewhere = Path(shutil.move(checkpoint(run, 8), tmp_path / "elsewhere"))
    checkpoint(run, 8).symlink_to(elsewhere)
    (run / "checkpoints/latest_checkpointed_iteration.txt").write_text("6\n")  # else the start mends it
    for _ in range(2):
        refuse(run, names=[str(checkpoint(run, 8)), str(elsewhere)])
        for number in (2, 4, 6):  # a link alone is no fresh start either
            shutil.rmtree(checkpoint(run, number), ignore_errors=True)
        (run / "metrics.jsonl").unlink(missing_ok=True)
    before = all_files(elsewhere)
    run_ok(run, [*REFERENCE, "checkpoint.load=none"])
    assert checkpoint(run, 8).is_dir()
    assert not checkpoint(run, 8).is_symlink()
    assert (run / "checkpoints/iter_0000008.superseded-1").is_symlink()
    assert all_files(elsewhere) == before
