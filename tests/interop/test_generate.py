"""Texts from saved models: one for one checkpoint, by whatever name, and the same for the same options."""

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
from tests.bpe import train_bpe
from tests.harness import compose
from tests.interop.states import overrides_of, state_of
from tests.unit.model_samples import FAMILIES, open_with_transformers, random_values, save_as_transformers
from trainer.commands.generate import main
from trainer.generate.sampling import Sampling, continue_with
from trainer.interop.open_model import open_model
from trainer.interop.output import write_checkpoint

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


def test_a_text_longer_than_the_context_keeps_its_last_tokens(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", replace(FAMILIES["llama3"], max_position_embeddings=16))
    found = greedy(folder, PROMPT, 30)
    assert len(found) == 30
    tokens = [*PROMPT, *found]
    for at in (20, 29):
        assert greedy(folder, tokens[at - 16 : at], 1) == tokens[at : at + 1]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoints of iterations 2 and 4 of a model whose vocabulary is padded."""
    folder, overrides = tmp_path_factory.mktemp("run") / "checkpoints", overrides_of("gpt2")
    config = compose([*overrides, "model.pad_vocab_multiple=64"])
    for iteration in (2, 4):
        state = state_of("gpt2", iteration, "model.pad_vocab_multiple=64")
        centred = replace(state, iteration=iteration, read=lambda name, s=state: s.read(name) - 0.5)
        write_checkpoint(replace(centred, has_optimizer=False), folder, config)
    return folder


def said(capsys: pytest.CaptureFixture[str], path: object, *options: str) -> str:
    assert main([str(path), "--prompt", "def f(", "--max-new-tokens", "12", *options]) == 0
    return capsys.readouterr().out


def test_a_run_its_checkpoints_and_its_newest_are_one_model(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = checkpoints / "iter_0000004"
    texts = {said(capsys, path) for path in (checkpoints.parent, checkpoints, newest, f"file://{newest}")}
    assert len(texts) == 1
    assert texts.pop().startswith("def f(")
    theirs = open_with_transformers(newest).generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False)
    assert greedy(newest, PROMPT, 20) == theirs[0, len(PROMPT) :].tolist()
    assert said(capsys, checkpoints / "iter_0000002") != said(capsys, newest)


def test_a_lost_tokenizer_is_named(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(checkpoints, tmp_path / "checkpoints"))
    assert said(capsys, f"file://{copy}") == said(capsys, copy)
    (copy / "iter_0000004/tokenizer.json").unlink()
    assert main([str(copy), "--prompt", "def f("]) == 2
    assert "tokenizer.json" in capsys.readouterr().err


def test_a_damaged_newest_checkpoint_is_skipped_and_named(checkpoints: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoints, tmp_path / "checkpoints")
    file = tmp_path / "checkpoints/iter_0000004/model.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1  # behind the first block, which is all that is checked before the rest is read
    file.write_bytes(damaged)
    _, folder = open_model(tmp_path, CPU)
    assert folder.name == "iter_0000002"


def test_what_a_terminal_cannot_show_is_escaped(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    assert main([str(checkpoints), "--prompt", "\u00e9", "--max-new-tokens", "1"]) == 0
    shown.flush()
    assert shown.buffer.getvalue().startswith(b"\\xe9")  # type: ignore[attr-defined]


def test_a_tokenizer_that_lies_in_the_folder_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(FAMILIES["llama3"], vocab_size=300, bos_token_id=0, eos_token_id=0)
    folder = written(tmp_path / "model", config)
    assert main([str(folder), "--prompt", "it is"]) == 2
    assert "--tokenizer" in capsys.readouterr().err
    (folder / "tokenizer.json").write_bytes(train_bpe(["it is so, and so it is\n"] * 50, 300))
    assert said(capsys, folder).startswith("def f(")


@pytest.mark.parametrize(
    ("name", "named"), [("none", "none"), ("empty", "empty"), ("bert", "bert"), ("pickled", "pytorch_model.bin")]
)
def test_what_is_no_model_of_ours_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, named: str
) -> None:
    for folder, config in (("bert", {"model_type": "bert"}), ("pickled", hf_config(FAMILIES["gpt2"]))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "pickled/pytorch_model.bin").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / name), "--prompt", "x"]) == 2
    assert named in capsys.readouterr().err


def test_half_precision_weights_are_read_as_float32(tmp_path: Path) -> None:
    half = AutoModelForCausalLM.from_pretrained(written(tmp_path / "model", FAMILIES["gpt2"]), dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    model, _ = open_model(tmp_path / "half", CPU)
    expected = half.state_dict()
    assert all(torch.equal(p, expected[name].float().view_as(p)) for name, p in model.named_parameters())
