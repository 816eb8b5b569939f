"""A run that begins from weights of another size."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reprise.errors import TrainerError
from tests.harness import TINY, curve, run_ok
from tests.resume.starts import start
from trainer.run.build import Run

# A start whose weights are saved as they were loaded, exactly.
SAVES = ["train.train_iters=1", "schedule.lr_warmup_iters=1", "checkpoint.save_steps=[0]"]
START = [*TINY, *SAVES, "checkpoint.weights_dtype=float32"]
LARGER = ["model.vocab_size=300", "model.max_position_embeddings=40"]
TABLES = {
    "gpt2": ["transformer.wte.weight", "transformer.wpe.weight"],
    "llama3": ["model.embed_tokens.weight", "lm_head.weight"],
}
RESIZE = ["checkpoint.finetune=true", "checkpoint.resize=true"]

Tensors = dict[str, torch.Tensor]


def weights_of(run: Run) -> Tensors:
    """Return the weights that a run holds, by name."""
    kept = [shard for shard in run.state.shards() if not shard.spec.name.startswith(("exp_avg", "step."))]
    return {shard.spec.name: shard.local.reshape(shard.spec.shape).clone() for shard in kept}


@pytest.fixture(autouse=True)
def level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return an iteration of each family: tied tables of GPT-2, two of LLaMA."""
    folders = {}
    for family in TABLES:
        run = tmp_path_factory.mktemp(family) / "run"
        run_ok(run, [f"model={family}_tiny", *TINY, "train.train_iters=2", "schedule.lr_warmup_iters=1"])
        folders[family] = run / "checkpoints/iter_0000002"
    return folders


@pytest.mark.parametrize("family", TABLES)
@pytest.mark.parametrize("is_ours", [True, False], ids=["checkpoint", "transformers"])
def test_old_rows_stay_and_new_ones_are_initial(
    bases: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, is_ours: bool
) -> None:
    base = bases[family]
    if not is_ours:
        ignored = shutil.ignore_patterns("manifest.json", "optimizer")
        base = Path(shutil.copytree(base, tmp_path / "theirs", ignore=ignored))
    model = [*START, f"model={family}_tiny", *LARGER]
    weights = weights_of(start(tmp_path / "run", *model, f"checkpoint.load={base}", *RESIZE))
    fresh, old = weights_of(start(tmp_path / "fresh", *model)), load_file(base / "model.safetensors")
    assert weights.keys() == old.keys()
    for name, value in old.items():
        assert torch.equal(weights[name][: len(value)], value), name
        assert torch.equal(weights[name][len(value) :], fresh[name][len(value) :]), name
        if name in TABLES[family]:
            assert len(weights[name]) > len(value)
            assert f"{name}: {len(value)} rows of {base} are kept by number" in caplog.text


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("gpt2", "parallel=tp2"),
        pytest.param("llama3", "parallel=tp2", marks=pytest.mark.slow),
        pytest.param("gpt2", "parallel=zero3", marks=pytest.mark.slow),
        pytest.param("gpt2", "parallel=pp2", marks=pytest.mark.slow),  # a copy of the table on each end
    ],
)
def test_new_rows_have_the_same_bits_on_two_ranks(
    bases: dict[str, Path], tmp_path: Path, family: str, layout: str
) -> None:
    load = [f"checkpoint.load={bases[family]}", *RESIZE]
    overrides = [*START, f"model={family}_tiny", *LARGER, *load]
    one = weights_of(start(tmp_path / "one", *overrides))
    run_ok(tmp_path / "two", [*overrides, layout], ranks=2)
    two = load_file(tmp_path / "two/checkpoints/weights/iter_0000000/model.safetensors")
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_fewer_positions_cut_the_table_and_the_run_resumes(bases: dict[str, Path], tmp_path: Path) -> None:
    more = [f"checkpoint.load={bases['gpt2']}", *RESIZE, "model.max_position_embeddings=20"]
    run_ok(tmp_path / "run", [*START, "model=gpt2_tiny", *more])
    weights = load_file(tmp_path / "run/checkpoints/weights/iter_0000000/model.safetensors")
    old = load_file(bases["gpt2"] / "model.safetensors")
    assert torch.equal(weights["transformer.wpe.weight"], old["transformer.wpe.weight"][:20])
    longer = ["train.train_iters=3", "schedule.lr_decay_iters=1"]
    assert "iteration 1 from" in run_ok(tmp_path / "run", [*START, "model=gpt2_tiny", *more, *longer]).text
    assert [row[0] for row in curve(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["checkpoint.resize=true"], r"checkpoint\.resize=true.*checkpoint\.finetune=true"),
        (["checkpoint.finetune=true", "model.vocab_size=300"], r"model\.vocab_size"),
        ([*RESIZE, "model.n_embd=24"], r"model\.n_embd"),
    ],
    ids=["resize", "no resize", "another width"],
)
def test_what_cannot_be_fitted_is_refused_by_name(
    bases: dict[str, Path], tmp_path: Path, overrides: list[str], text: str
) -> None:
    with pytest.raises(TrainerError, match=f"(?s){text}"):
        start(tmp_path / "run", *START, "model=gpt2_tiny", f"checkpoint.load={bases['gpt2']}", *overrides)
