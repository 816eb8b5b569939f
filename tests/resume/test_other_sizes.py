"""A run that begins from weights of another size, or from parts of them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.harness import TINY, Ended, curve, launch, run_ok

# A start whose weights are saved as they were loaded, exactly.
START = [
    *TINY, "train.train_iters=1", "schedule.lr_warmup_iters=1", "checkpoint.save_steps=[0]",
    "checkpoint.weights_dtype=float32",
]  # fmt: skip
LARGER = ["model.vocab_size=300", "model.max_position_embeddings=40"]
TABLES = {
    "gpt2": ["transformer.wte.weight", "transformer.wpe.weight"],
    "llama3": ["model.embed_tokens.weight", "lm_head.weight"],
}

Tensors = dict[str, torch.Tensor]


def begun(folder: Path, overrides: list[str], *, ranks: int = 1) -> tuple[Tensors, Ended]:
    """Return the weights with which a run begins, and how it ended."""
    ended = run_ok(folder, [*START, *overrides], ranks=ranks)
    return load_file(folder / "checkpoints/weights/iter_0000000/model.safetensors"), ended


def from_base(base: Path, *overrides: str) -> list[str]:
    return [f"checkpoint.load={base}", "checkpoint.finetune=true", *overrides]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return an iteration of each family: tied tables of GPT-2, two of LLaMA."""
    found = {}
    for family in TABLES:
        folder = tmp_path_factory.mktemp(family) / "run"
        run_ok(folder, [f"model={family}_tiny", *TINY, "train.train_iters=2", "schedule.lr_warmup_iters=1"])
        found[family] = folder / "checkpoints/iter_0000002"
    return found


@pytest.mark.parametrize("family", TABLES)
@pytest.mark.parametrize("is_ours", [True, False], ids=["checkpoint", "transformers"])
def test_old_rows_stay_and_new_ones_are_initial(
    bases: dict[str, Path], tmp_path: Path, family: str, is_ours: bool
) -> None:
    base = bases[family]
    if not is_ours:
        base = Path(
            shutil.copytree(base, tmp_path / "theirs", ignore=shutil.ignore_patterns("manifest.json", "optimizer"))
        )
    model = [f"model={family}_tiny", *LARGER]
    found, ended = begun(tmp_path / "run", [*model, *from_base(base, "checkpoint.resize=true")])
    fresh, _ = begun(tmp_path / "fresh", model)
    given = load_file(base / "model.safetensors")
    assert found.keys() == given.keys()
    for name, value in given.items():
        assert torch.equal(found[name][: len(value)], value), name
        assert torch.equal(found[name][len(value) :], fresh[name][len(value) :]), name
        if name in TABLES[family]:
            assert len(found[name]) > len(value)
            assert f"{name}: {len(value)} rows of {base} are kept by number, new rows: initial" in ended.text


@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama3", marks=pytest.mark.slow)])
def test_the_mean_has_the_same_bits_on_tensor_parallel_ranks(
    bases: dict[str, Path], tmp_path: Path, family: str
) -> None:
    more = from_base(bases[family], "checkpoint.resize=true", "checkpoint.new_rows=mean")
    overrides = [f"model={family}_tiny", *LARGER, *more]
    one, _ = begun(tmp_path / "one", overrides)
    two, _ = begun(tmp_path / "two", [*overrides, "parallel=tp2"], ranks=2)
    given = load_file(bases[family] / "model.safetensors")
    for name, value in one.items():
        assert torch.equal(value, two[name]), name
        assert torch.equal(value[: len(given[name])], given[name]), name
    for name in TABLES[family]:
        mean = given[name].double().mean(0).float()
        assert all(torch.equal(row, mean) for row in one[name][len(given[name]) :])


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["parallel.zero_stage=3", "parallel=pp2"]
)  # with a copy of the tied table on each end
def test_new_rows_are_initial_on_two_ranks_too(bases: dict[str, Path], tmp_path: Path, layout: str) -> None:
    overrides = ["model=gpt2_tiny", *LARGER, *from_base(bases["gpt2"], "checkpoint.resize=true")]
    one, _ = begun(tmp_path / "one", overrides)
    two, _ = begun(tmp_path / "two", [*overrides, layout], ranks=2)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_fewer_positions_cut_the_table_and_the_run_resumes(bases: dict[str, Path], tmp_path: Path) -> None:
    more = from_base(bases["gpt2"], "checkpoint.resize=true", "model.max_position_embeddings=20")
    found, _ = begun(tmp_path / "run", ["model=gpt2_tiny", *more])
    given = load_file(bases["gpt2"] / "model.safetensors")
    assert torch.equal(found["transformer.wpe.weight"], given["transformer.wpe.weight"][:20])
    ended = run_ok(
        tmp_path / "run", [*START, "model=gpt2_tiny", *more, "train.train_iters=3", "schedule.lr_decay_iters=1"]
    )
    assert "iteration 1 from" in ended.text
    assert [row[0] for row in curve(tmp_path / "run")] == [1, 2, 3]


def test_parts_are_loaded_and_all_others_are_named(bases: dict[str, Path], tmp_path: Path) -> None:
    deeper = ["model=gpt2_tiny", "model.n_layer=3"]
    found, ended = begun(tmp_path / "run", [*deeper, *from_base(bases["gpt2"], "checkpoint.partial=[*.wte.*,*.h.1.*]")])
    fresh, _ = begun(tmp_path / "fresh", deeper)
    given = load_file(bases["gpt2"] / "model.safetensors")
    ((count, names),) = re.findall(r"not loaded from .*, (\d+) tensors keep initial values: (.*)", ended.text)
    assert len(names.split(", ")) == int(count)
    for name, value in found.items():
        is_loaded = ".wte." in name or ".h.1." in name
        assert torch.equal(value, given[name] if is_loaded else fresh[name]), name
        assert (name in names.split(", ")) is not is_loaded


def test_parts_of_a_transformers_folder(bases: dict[str, Path], tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    shutil.copytree(bases["llama3"], theirs, ignore=shutil.ignore_patterns("manifest.json", "optimizer"))
    model = ["model=llama3_tiny", "model.tie_word_embeddings=true"]
    found, ended = begun(tmp_path / "run", [*model, *from_base(theirs, "checkpoint.partial=[*embed_tokens*,*.0.*]")])
    fresh, _ = begun(tmp_path / "fresh", model)
    given = load_file(theirs / "model.safetensors")
    loaded = {name for name in found if "embed_tokens" in name or ".0." in name}
    for name, value in found.items():
        assert torch.equal(value, given[name] if name in loaded else fresh[name]), name
    assert f"{len(found) - len(loaded)} tensors keep initial values: " in ended.text
    assert f"loaded {len(loaded)} of {len(found)} tensors" in ended.text


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["checkpoint.resize=true"], "checkpoint.resize=True: needs checkpoint.finetune=true"),
        (["checkpoint.partial=[*wte*]"], "checkpoint.partial=['*wte*']: needs checkpoint.finetune=true"),
        (["checkpoint.finetune=true", "model.vocab_size=300"], "model.vocab_size"),
        (["checkpoint.finetune=true", "checkpoint.resize=true", "model.n_embd=24"], "model.n_embd"),
        (["checkpoint.finetune=true", "checkpoint.partial=[*wte*,nothing]"], "fits no tensor of the model"),
        (["checkpoint.finetune=true", "checkpoint.partial=[*wte*]", "model.n_embd=24"], "has shape [257, 20]"),
    ],
    ids=["resize", "partial", "no resize", "another width", "no such tensor", "another shape"],
)
def test_what_cannot_be_fitted_is_refused_by_name(
    bases: dict[str, Path], tmp_path: Path, overrides: list[str], text: str
) -> None:
    load = f"checkpoint.load={bases['gpt2']}"
    ended = launch(tmp_path / "run", [*START, "model=gpt2_tiny", load, *overrides])
    assert ended.statuses == (1,)
    assert text in ended.text
