"""Texts from saved models: what transformers makes of the same folder, and the same for the same options."""

from __future__ import annotations

import io
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.config import ModelConfig
from models.families import hf_config
from tests.harness import TINY, run_ok
from tests.stores.saving import content
from tests.unit.model_samples import FAMILIES, VARIANTS, open_with_transformers, random_values, save_as_transformers
from trainer.commands import convert
from trainer.commands.generate import main
from trainer.data.bpe import train_bpe
from trainer.generate.sampling import Sampling, continue_with
from trainer.interop.open_model import open_model

PROMPT = [100, 3, 256, 17, 17, 80]
CPU = torch.device("cpu")


def written(folder: Path, config: ModelConfig) -> Path:
    """Write a model of random values as transformers does."""
    torch.manual_seed(7)
    folder.mkdir()
    save_as_transformers(folder, config, random_values(config))
    return folder


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Return what our model goes on with."""
    model, _ = open_model(folder, CPU)
    return continue_with(model, prompt, Sampling(), max_new_tokens=count)


def scores_of(folder: Path) -> torch.Tensor:
    """Return our model's scores of each next token of the prompt."""
    model, _ = open_model(folder, CPU)
    with torch.no_grad():
        scores: torch.Tensor = model(torch.tensor([PROMPT]))
    return scores


def theirs(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Return what transformers goes on with."""
    found = open_with_transformers(folder).generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return [int(token) for token in found[0, len(prompt) :]]


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = written(tmp_path / "model", VARIANTS[name])
    found = greedy(folder, PROMPT, 40)
    assert found == theirs(folder, PROMPT, 40)
    assert len(set(found)) > 1


def test_the_end_of_text_ends_it_as_in_transformers(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", FAMILIES["gpt2"])
    end = greedy(folder, PROMPT, 20)[11]
    for name, table in (("config.json", hf_config(FAMILIES["gpt2"])), ("generation_config.json", dict[str, object]())):
        (folder / name).write_text(json.dumps({**table, "eos_token_id": end}))
    found = greedy(folder, PROMPT, 20)
    assert found == theirs(folder, PROMPT, 20)
    assert found[-1] == end
    assert len(found) <= 12


def test_a_text_longer_than_the_context_keeps_its_last_tokens(tmp_path: Path) -> None:
    config = replace(FAMILIES["llama3"], max_position_embeddings=16)
    folder = written(tmp_path / "model", config)
    found = greedy(folder, PROMPT, 30)
    assert len(found) == 30
    tokens = [*PROMPT, *found]
    for at in (20, 29):
        assert greedy(folder, tokens[at - 16 : at], 1) == tokens[at : at + 1]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with checkpoints of iterations 2 and 4, whose vocabulary is padded."""
    folder = tmp_path_factory.mktemp("generate") / "run"
    sizes = [*TINY, "model=gpt2_tiny", "model.pad_vocab_multiple=64"]
    run_ok(folder, [*sizes, "train.train_iters=4", "schedule.lr_warmup_iters=0", "checkpoint.save_interval=2"])
    return folder


def test_a_run_its_checkpoints_and_its_newest_are_one_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = run / "checkpoints/iter_0000004"
    texts = set()
    for path in (run, run / "checkpoints", newest, f"file://{newest}"):
        assert main([str(path), "--prompt", "def f(", "--max-new-tokens", "12"]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1
    assert texts.pop().startswith("def f(")
    # Far less than 32 positions, so that transformers has as many.
    assert greedy(newest, PROMPT, 20) == theirs(newest, PROMPT, 20)
    scores = [scores_of(folder) for folder in (run, newest, run / "checkpoints/iter_0000002")]
    assert torch.equal(scores[0], scores[1])
    assert not torch.equal(scores[1], scores[2])


def test_a_stored_checkpoint_is_exported_as_one_on_a_disk(run: Path, tmp_path: Path) -> None:
    newest = run / "checkpoints/iter_0000004"
    for source, out in ((str(newest), "disk"), (f"file://{run / 'checkpoints'}", "store")):
        assert convert.main(["export", "hf", source, str(tmp_path / out)]) == 0
    assert content(tmp_path / "store") == content(tmp_path / "disk")
    assert "tokenizer.json" in content(tmp_path / "store")


def test_a_lost_tokenizer_is_taken_from_another_checkpoint(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(run / "checkpoints", tmp_path / "checkpoints"))
    expected = [main([str(copy), "--prompt", "def f("]), capsys.readouterr().out]
    (copy / "iter_0000004/tokenizer.json").unlink()
    assert [main([f"file://{copy}", "--prompt", "def f("]), capsys.readouterr().out] == expected
    assert [main([str(copy), "--prompt", "def f("]), capsys.readouterr().out] == expected
    (copy / "iter_0000002/tokenizer.json").write_bytes(b"{}")
    assert main([str(copy), "--prompt", "def f("]) == 2
    assert "no undamaged tokenizer.json" in capsys.readouterr().err


def test_a_damaged_newest_checkpoint_is_skipped_and_named(run: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "checkpoints"
    shutil.copytree(run / "checkpoints", damaged)
    file = damaged / "iter_0000004/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # behind the first block, which is all that is checked before the rest is read
    file.write_bytes(content)
    _, folder = open_model(tmp_path, CPU)
    assert folder.name == "iter_0000002"


def test_texts_are_a_function_of_the_options(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*options: str) -> str:
        assert main([str(run), "--prompt", "x", "--max-new-tokens", "15", *options]) == 0
        return capsys.readouterr().out

    warm = ["--temperature", "0.9"]
    assert text(*warm, "--seed", "1") == text(*warm, "--seed", "1")
    assert len({text(*warm, "--seed", str(seed)) for seed in range(5)}) == 5
    assert text(*warm, "--top-k", "1") == text()


def test_what_a_terminal_cannot_show_is_escaped(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    assert main([str(run), "--prompt", "\u00e9", "--max-new-tokens", "1"]) == 0
    shown.flush()
    assert shown.buffer.getvalue().startswith(b"\\xe9")  # type: ignore[attr-defined]


def test_a_tokenizer_that_lies_in_the_folder_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(FAMILIES["llama3"], vocab_size=300, bos_token_id=0, eos_token_id=0)
    folder = written(tmp_path / "model", config)
    assert main([str(folder), "--prompt", "it is"]) == 2
    assert "--tokenizer" in capsys.readouterr().err
    (folder / "tokenizer.json").write_bytes(train_bpe(["it is so, and so it is\n"] * 50, 300))
    assert main([str(folder), "--prompt", "it is", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("it is")


REFUSED = {
    "no folder": ("none", "There is no checkpoint folder"),
    "an empty folder": ("empty", "holds no checkpoint"),
    "a family that is not ours": ("bert", "gpt2, llama or qwen3"),
    "pickled tensors": ("pickled", "pickle"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_model_of_ours_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    name, message = REFUSED[case]
    for folder, config in (("bert", {"model_type": "bert"}), ("pickled", hf_config(FAMILIES["gpt2"]))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "pickled/pytorch_model.bin").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / name), "--prompt", "x"]) == 2
    assert message in capsys.readouterr().err


def test_half_precision_weights_are_read_as_float32(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", FAMILIES["gpt2"])
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    model, _ = open_model(tmp_path / "half", CPU)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.float32)
    found = whole.generate(torch.tensor([PROMPT]), max_new_tokens=10, do_sample=False)
    assert continue_with(model, PROMPT, Sampling(), max_new_tokens=10) == found[0, len(PROMPT) :].tolist()
