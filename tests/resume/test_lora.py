"""A run of adapters goes on on its base and on no other. `test_bitwise_resume.py` kills one and resumes it."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reprise.errors import CheckpointError, MismatchError, TrainerError
from reprise.storage import Files
from tests.harness import TINY, checkpoint, curve, run_ok, tensor_files
from tests.messages import refused
from tests.profiles import nightly
from tests.resume.starts import start
from trainer.interop.open_model import open_model

BASE = [*TINY, "train.micro_batch_size=3", "train.threads=1", "checkpoint.save_interval=2", "schedule.lr_decay_iters=8"]
LORA = ["model.lora.rank=4", "model.lora.dropout=0.1", "train.train_iters=4", "optimizer.lr=0.01"]
MODELS = {
    "gpt2": ["model=gpt2_tiny", "model.lora.target_modules=[c_attn,c_proj]"],
    "llama3": ["model=llama3_tiny", "model.n_kv_head=2", "model.lora.target_modules=[q_proj,o_proj,up_proj,down_proj]"],
}
GPT2 = [*BASE, *MODELS["gpt2"], *LORA]
LANES = ["parallel.invariant_ranks=4", "checkpoint.reshard=true"]
TP, SP, PP = "parallel=tp2", "parallel=tp2_sp", "parallel=pp2"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a checkpoint of each family to put adapters on."""
    folders = {}
    for name, model in MODELS.items():
        run = tmp_path_factory.mktemp("base") / name
        run_ok(run, [*BASE, *(word for word in model if "lora" not in word), "train.train_iters=4"])
        folders[name] = checkpoint(run, 4)
    return folders


@pytest.fixture(scope="module")
def tuned(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of adapters on iteration 2 of a base that has newer ones."""
    folder = tmp_path_factory.mktemp("tuned") / "run"
    run_ok(folder, on(bases["gpt2"].with_name("iter_0000002"), "gpt2"))
    return folder


def on(base: Path, model: str, *more: str) -> list[str]:
    begin = [f"checkpoint.load={base}", "checkpoint.finetune=true"]
    return [*BASE, *MODELS[model], *LORA, *begin, *more]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "axes"), [nightly("gpt2", TP), ("llama3", SP)])
def test_tensor_parallel_ranks_write_the_bytes_of_one(
    bases: dict[str, Path], tmp_path: Path, model: str, axes: str
) -> None:
    # The trained adapters of one rank, loaded and saved at once.
    run_ok(tmp_path / "one", on(bases[model], model, LANES[0]))
    trained = checkpoint(tmp_path / "one", 4)
    load = [f"checkpoint.base={bases[model]}", f"checkpoint.load={trained}", "checkpoint.finetune=false"]
    run_ok(tmp_path / "moved", [*on(bases[model], model), *LANES, *load, axes], ranks=2)
    assert tensor_files(checkpoint(tmp_path / "moved", 4)) == tensor_files(trained)
    # The initial values, which a rate of 0 leaves as they are.
    weights = []
    for name, more, ranks in (("still", list[str](), 1), ("two", [axes], 2)):
        still = on(bases[model], model, "optimizer.lr=0.0", "schedule.min_lr=0.0", *more)
        run_ok(tmp_path / name, still, ranks=ranks)
        weights.append((checkpoint(tmp_path / name, 4) / "adapter_model.safetensors").read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", nightly("llama3")])
def test_tensor_parallel_ranks_train_the_curve_of_one(bases: dict[str, Path], tmp_path: Path, model: str) -> None:
    losses = []
    for name, axes, ranks in (("one", list[str](), 1), ("two", [SP], 2)):
        dry = ["model.lora.dropout=0.0", *(["model.dropout=0.0"] if model == "gpt2" else []), "train.train_iters=8"]
        run_ok(tmp_path / name, on(bases[model], model, *dry, *axes), ranks=ranks)
        losses.append([float.fromhex(row[1]) for row in curve(tmp_path / name)])
    # Sums in another order: float32 rounding, and what the optimizer makes of it in seven further iterations.
    assert losses[1] == pytest.approx(losses[0], rel=2e-5)


@pytest.mark.slow
def test_a_folder_and_its_base_continue_the_run(bases: dict[str, Path], tmp_path: Path) -> None:
    longer = ["train.micro_batch_size=2", "train.train_iters=8"]
    run_ok(tmp_path / "run", on(bases["gpt2"], "gpt2", *longer))
    folder = shutil.copytree(checkpoint(tmp_path / "run", 4), tmp_path / "given/iter_0000004")
    load = [f"checkpoint.load={folder}", f"checkpoint.base={bases['gpt2']}", "logging.tensorboard=false"]
    run_ok(tmp_path / "again", load)
    assert curve(tmp_path / "again") == curve(tmp_path / "run")[4:]
    assert tensor_files(checkpoint(tmp_path / "again", 8)) == tensor_files(checkpoint(tmp_path / "run", 8))


def test_no_path_is_recorded(bases: dict[str, Path], tuned: Path) -> None:
    for path in checkpoint(tuned, 4).glob("*.json"):
        assert str(bases["gpt2"].parent) not in path.read_text()


def test_a_run_of_adapters_names_the_base_that_it_needs(bases: dict[str, Path], tuned: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(tuned, tmp_path / "run"))
    before = tensor_files(run)
    with pytest.raises(MismatchError, match=r"(?s)base\.xxh3_64.*checkpoint\.base"):
        start(run, *GPT2, f"checkpoint.base={bases['gpt2']}")
    for base, name in (
        ([], "checkpoint.base"),
        ([f"checkpoint.base={checkpoint(run, 4)}"], "checkpoint.base"),
        ([f"checkpoint.base={tmp_path / 'nowhere'}"], "nowhere"),
    ):
        with pytest.raises(TrainerError, match=name):
            start(run, *GPT2, *base)
    assert tensor_files(run) == before
    # The same bytes at another path are the same base.
    moved = shutil.copytree(bases["gpt2"].with_name("iter_0000002"), tmp_path / "moved")
    assert start(run, *GPT2, f"checkpoint.base={moved}").state.progress.iteration == 4


def test_whole_weights_and_adapters_are_not_confused(bases: dict[str, Path], tuned: Path, tmp_path: Path) -> None:
    adapters, whole = checkpoint(tuned, 4), bases["gpt2"]
    base = f"checkpoint.base={whole.with_name('iter_0000002')}"
    with pytest.raises(MismatchError, match=r"model\.lora\.rank"):
        start(tmp_path / "whole", *BASE, "model=gpt2_tiny", "train.train_iters=4", f"checkpoint.load={adapters}")
    with pytest.raises(MismatchError, match=r"model\.lora\.rank"):
        start(tmp_path / "adapters", *GPT2, f"checkpoint.base={whole}", f"checkpoint.load={whole}")
    # The adapters of one run begin another, at iteration 0.
    run = start(tmp_path / "again", *GPT2, base, f"checkpoint.load={adapters}", "checkpoint.finetune=true")
    assert run.state.progress.iteration == 0
    values = load_file(adapters / "adapter_model.safetensors")
    shards = {shard.spec.name: shard.local for shard in run.state.shards()}
    assert all(torch.equal(shards[name].reshape(value.shape), value) for name, value in values.items())


def test_the_base_of_a_run_that_went_on_is_named_by_iteration(bases: dict[str, Path], tuned: Path) -> None:
    base = bases["gpt2"].parents[1]
    with pytest.raises(MismatchError, match=r"base\.xxh3_64"):
        start(tuned, *GPT2, f"checkpoint.base={base}")
    assert start(tuned, *GPT2, f"checkpoint.base={checkpoint(base, 2)}").state.progress.iteration == 4
    model, folder = open_model(tuned, torch.device("cpu"), base)
    assert folder == checkpoint(tuned, 4)
    assert model.config.n_layer == 2


@pytest.mark.slow
def test_a_base_that_cannot_be_read_for_a_moment_is_no_other(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest, size, failures = bases["gpt2"], Files.size, [OSError(errno.EIO, os.strerror(errno.EIO))] * 2
    run_ok(tmp_path / "run", on(newest, "gpt2"))

    def fail(files: Files, path: Path) -> int:
        if path.parent == newest and failures:
            raise failures.pop()
        return size(files, path)

    monkeypatch.setattr(Files, "size", fail)
    run = start(tmp_path / "run", *GPT2, f"checkpoint.base={newest.parents[1]}")
    assert run.state.progress.iteration == 4
    assert not failures


def test_a_base_of_another_model_names_no_other_run(bases: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"(?s)model\.n_embd.*another base"):
        start(tmp_path / "run", *GPT2, "model.n_embd=24", f"checkpoint.base={bases['gpt2']}")
    with refused(CheckpointError, "checkpoint.base", "nowhere"):
        start(tmp_path / "run", *GPT2, f"checkpoint.base={tmp_path / 'nowhere'}")
