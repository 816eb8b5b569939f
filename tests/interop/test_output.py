"""A state that is written from a source is a checkpoint as a run of one process saves it."""

from __future__ import annotations

import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from reprise.errors import CheckpointError, LockError, TrainerError
from reprise.loading import open_checkpoint
from reprise.storage import Files, FolderLock
from tests.harness import TINY, all_files, compose, curve, run_ok, tensor_files
from tests.messages import refused
from trainer.commands import checkpoint as look
from trainer.interop.output import write_checkpoint
from trainer.interop.source import StateSource, of_checkpoint

OVERRIDES = [*TINY, "train.train_iters=4", "checkpoint.save_interval=2", "checkpoint.file_bytes=16384"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with checkpoints at iterations 2 and 4."""
    folder = tmp_path_factory.mktemp("output") / "run"
    run_ok(folder, OVERRIDES)
    return folder


def source_of(run: Path, iteration: int = 2) -> StateSource:
    return of_checkpoint(open_checkpoint(run / f"checkpoints/iter_{iteration:07d}", Files()))


def test_a_checkpoint_written_again_has_its_bytes_and_resumes(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "again/checkpoints"
    path = write_checkpoint(source_of(run), folder, compose(OVERRIDES))
    theirs = run / "checkpoints/iter_0000002"
    assert path == folder / "iter_0000002"
    assert len(tensor_files(path)) > 3
    assert tensor_files(path) == tensor_files(theirs)
    for name in ("config.json", "generation_config.json", "model.safetensors.index.json"):
        assert (path / name).read_bytes() == (theirs / name).read_bytes()
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "2\n"
    assert sorted(p.name for p in folder.iterdir()) == ["iter_0000002", "latest_checkpointed_iteration.txt", "lock"]
    assert look.main(["verify", str(path)]) == 0
    ours, saved = (open_checkpoint(p, Files()) for p in (path, theirs))
    assert ours.manifest.tensors == saved.manifest.tensors
    expected = {name: value for name, value in saved.state.items() if name != "run"}  # it is of no run yet
    expected["batch"] = {**saved.state["batch"]}
    del expected["batch"]["micro_batch_size"]
    assert {**ours.state, "environment": 0, "best_loss": 0} == {**expected, "environment": 0, "best_loss": 0}

    run_ok(tmp_path / "again", OVERRIDES)
    assert curve(tmp_path / "again") == curve(run)[2:]
    assert tensor_files(folder / "iter_0000004") == tensor_files(run / "checkpoints/iter_0000004")


def test_tensors_of_other_dtypes_become_float32(run: Path, tmp_path: Path) -> None:
    source = source_of(run)
    narrow = replace(source, read=lambda name: source.read(name).to(torch.bfloat16), has_optimizer=False)
    path = write_checkpoint(narrow, tmp_path, compose(OVERRIDES))
    assert not (path / "optimizer").exists()
    found = of_checkpoint(open_checkpoint(path, Files()))
    name = "transformer.h.1.attn.c_attn.weight"
    assert torch.equal(found.read(name), source.read(name).to(torch.bfloat16).float())


def test_samples_are_counted_or_told(run: Path, tmp_path: Path) -> None:
    growing = ["train.batch_schedule=0:4 4:12", "schedule.lr_decay_samples=100", "schedule.lr_warmup_samples=8"]
    growing = [*(word for word in OVERRIDES if not word.startswith("schedule")), *growing]
    state = open_checkpoint(write_checkpoint(source_of(run), tmp_path / "c", compose(growing)), Files()).state
    assert (state["consumed_samples"], state["batch"]["batch_schedule"]) == (16, "0:4 4:12")
    path = write_checkpoint(source_of(run), tmp_path, compose(OVERRIDES), consumed_samples=77)
    state = open_checkpoint(path, Files()).state
    assert (state["consumed_samples"], state["consumed_tokens"]) == (77, 77 * 16)


@pytest.mark.parametrize(
    ("words", "samples"),
    [
        (["train.batch_schedule=0:4 x"], None),
        (["data=megatron", "data.train=[{path: a}]"], None),
        (["data=megatron", "data.train=[{path: a, weight: 0}]"], None),
        ([], -1),
        ([], 1 << 62),
        (["model.n_layer=1"], None),
    ],
)
def test_what_no_run_can_come_to_is_refused(run: Path, tmp_path: Path, words: list[str], samples: int | None) -> None:
    named = [str(samples)] if samples else [words[-1].split("=")[0]]
    with refused(TrainerError, *named):
        write_checkpoint(source_of(run), tmp_path / "new", compose([*OVERRIDES, *words]), consumed_samples=samples)
    assert not (tmp_path / "new").exists()


def test_an_iteration_that_is_there_is_never_overwritten(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "checkpoints/iter_0000002", tmp_path / "iter_0000002")
    before = all_files(tmp_path / "iter_0000002")
    with refused(CheckpointError, "iter_0000002"):
        write_checkpoint(source_of(run), tmp_path, compose(OVERRIDES))
    assert all_files(tmp_path / "iter_0000002") == before
    assert not list(tmp_path.glob(".*partial"))


def test_a_folder_that_a_run_holds_is_refused(run: Path, tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, "nonce")
    lock.acquire()
    try:
        with pytest.raises(LockError, match="This process"):
            write_checkpoint(source_of(run), tmp_path, compose(OVERRIDES))
    finally:
        lock.release()
    assert [p.name for p in tmp_path.iterdir()] == ["lock"]


def test_a_source_that_fails_leaves_nothing(run: Path, tmp_path: Path) -> None:
    source = source_of(run)

    def read(name: str) -> torch.Tensor:
        found = source.read(name)
        return found[:-1] if name == "exp_avg.transformer.wpe.weight" else found

    with refused(CheckpointError, "exp_avg.transformer.wpe.weight"):
        write_checkpoint(replace(source, read=read), tmp_path, compose(OVERRIDES))
    assert [p.name for p in tmp_path.iterdir()] == ["lock"]


def test_a_tensor_is_gone_before_the_next_one_is_read(run: Path, tmp_path: Path) -> None:
    source, alive = source_of(run), list[weakref.ref[Any]]()

    def read(name: str) -> torch.Tensor:
        assert not any(one() is not None for one in alive), f"a tensor before {name} is in memory"
        values = source.read(name).numpy().copy()
        alive.append(weakref.ref(values))
        return torch.from_numpy(values)

    made = write_checkpoint(replace(source, read=read), tmp_path, compose(OVERRIDES))
    assert tensor_files(made) == tensor_files(run / "checkpoints/iter_0000002")
