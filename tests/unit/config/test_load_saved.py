"""A command finds what belongs to the weights it names."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from models.config import LoraConfig, ModelConfig
from reprise.errors import DataError
from reprise.storage import FILE_SYSTEM
from tests.bpe import train_bpe
from tests.harness import TINY, launch, run_ok
from tests.interop.test_import_checks import values, write_hf
from tests.messages import refused
from tests.unit.model_samples import LLAMA3, VARIANTS, open_with_transformers, random_values, save_as_transformers
from trainer.commands import convert
from trainer.config.compose import CommandLine, resolve_command
from trainer.config.saved import RUN_CONFIG
from trainer.data import corpus
from trainer.data.byte_level import bytes_tokenizer
from trainer.data.sources import text_sources
from trainer.data.token_file import write_token_file

MODEL = ["model=gpt2_tiny", *TINY]
TEXTS = ["data=text", "data.path=texts/*.txt"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of transformers, with a tokenizer of 257 tokens beside the model; the library is small."""
    (tmp_path / "library").mkdir()
    for number in range(3):
        (tmp_path / f"library/{number}.py").write_text(f"# a text of texts, number {number}\n" * 100)
    monkeypatch.setattr(corpus, "stdlib_sources", lambda _root: text_sources(f"{tmp_path}/library/*.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_hf(tmp_path / "theirs", values())
    (folder / "tokenizer.json").write_bytes(train_bpe(["a text of texts"], 257))
    return folder


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str | None]:
    """Return a function from the words of a command to the tokenizer of its texts."""

    def tokenizer(*words: str) -> str | None:
        command = CommandLine((f"run.dir={tmp_path}/run", *words))
        return resolve_command(command, FILE_SYSTEM).config.data.tokenizer

    return tokenizer


def imported(folder: Path, run: Path, *words: str) -> Path:
    """Return the checkpoint of a run, made of a folder of transformers."""
    assert convert.main(["import", "hf", str(folder), str(run / "checkpoints"), "train.seq_length=16", *words]) == 0
    return run / "checkpoints/iter_0000000"


@pytest.mark.parametrize("data", [TEXTS, pytest.param([], marks=pytest.mark.slow)])
def test_texts_have_the_tokenizer_of_the_weights(
    folder: Path, tmp_path: Path, tokenizer: Callable[..., str | None], data: list[str]
) -> None:
    beside = f"{folder}/tokenizer.json"
    tuned = [*data, f"checkpoint.load={folder}", "checkpoint.finetune=true"]
    assert tokenizer(*MODEL, *tuned) == beside
    assert tokenizer(*MODEL, *data, "model.lora.rank=2", f"checkpoint.base={folder}") == beside
    for word in ("bytes", "other.json"):
        assert tokenizer(*MODEL, *tuned, f"data.tokenizer={word}") == word
    for word in ("override_data=true", "allow=[data]", "allow=[all]"):
        assert tokenizer(*MODEL, *data, f"checkpoint.load={folder}", f"checkpoint.{word}") == beside
    for words in ([], [f"checkpoint.load={folder}"], ["checkpoint.load=none"]):
        assert tokenizer(*MODEL, *data, *words) is None
    (folder / "tokenizer.json").write_bytes(bytes_tokenizer())
    assert tokenizer(*MODEL, *tuned) is None
    (folder / "tokenizer.json").unlink()
    assert tokenizer(*MODEL, *tuned) is None
    assert tokenizer(*MODEL, "checkpoint.finetune=true", "checkpoint.load=gone", *data) is None
    files = ["data=token_file", "data.train=a.bin"]  # of unknown origin
    assert tokenizer(*MODEL, *files, f"checkpoint.load={folder}", "checkpoint.finetune=true") is None


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_a_tokenizer_in_another_form_is_refused(
    folder: Path, tmp_path: Path, tokenizer: Callable[..., str | None], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (folder / "tokenizer.json").rename(folder / name)
    tuned = [*TEXTS, f"checkpoint.load={folder}", "checkpoint.finetune=true"]
    with refused(DataError, "data.tokenizer", f"{folder}/{name}"):
        tokenizer(*MODEL, *tuned)
    assert tokenizer(*MODEL, *tuned, "data.tokenizer=bytes") == "bytes"
    command = ["import", "hf", str(folder), str(tmp_path / "run"), "train.seq_length=16"]
    assert convert.main(command) == 2
    assert f"that of {folder}/{name}" in capsys.readouterr().err
    write_token_file(tmp_path / "a.bin", [np.arange(100)], dtype=np.uint16)
    assert convert.main([*command, "data=token_file", f"data.train={tmp_path}/a.bin"]) == 0
    assert (tmp_path / "run/iter_0000000" / name).exists()


def test_texts_have_the_tokenizer_of_a_checkpoint(
    folder: Path, tmp_path: Path, tokenizer: Callable[..., str | None]
) -> None:
    base = imported(folder, tmp_path / "base")
    tuned = [*TEXTS, f"checkpoint.load={tmp_path}/base", "checkpoint.finetune=true"]
    assert tokenizer(*tuned) == tokenizer(*MODEL, *tuned) == f"{base}/tokenizer.json"
    run = imported(folder, tmp_path / "run")  # which goes on with its own
    tuned = [*MODEL, *TEXTS, f"checkpoint.load={folder}", "checkpoint.finetune=true"]
    assert tokenizer(*tuned) == f"{run}/tokenizer.json"
    assert tokenizer(*MODEL, *TEXTS, "checkpoint.override_data=true") == f"{run}/tokenizer.json"
    shutil.rmtree(folder)
    assert tokenizer(*tuned) == f"{run}/tokenizer.json"


def test_an_import_without_data_has_the_tokenizer_of_the_folder(folder: Path, tmp_path: Path) -> None:
    def data_of(checkpoint: Path) -> dict[str, object]:
        return dict(json.loads((checkpoint / RUN_CONFIG).read_text())["config"]["data"])

    checkpoint, beside = imported(folder, tmp_path / "run"), folder / "tokenizer.json"
    assert data_of(checkpoint)["tokenizer"] == str(beside)
    assert (checkpoint / "tokenizer.json").read_bytes() == beside.read_bytes()
    (tmp_path / "copy.json").write_bytes(beside.read_bytes())
    (tmp_path / "other.json").write_bytes(beside.read_bytes() + b"\n")
    (folder / "chat_template.jinja").write_text("a template")
    for word in ("bytes", "copy.json", "other.json"):
        path = word if word == "bytes" else f"{tmp_path}/{word}"
        checkpoint = imported(folder, tmp_path / f"run-{word}", f"data.tokenizer={path}")
        assert data_of(checkpoint)["tokenizer"] == path
        content = bytes_tokenizer() if word == "bytes" else Path(path).read_bytes()
        assert (checkpoint / "tokenizer.json").read_bytes() == content
        assert (checkpoint / "chat_template.jinja").exists() == (word == "copy.json")


@pytest.mark.parametrize("name", VARIANTS)
def test_a_folder_of_transformers_brings_its_model(tmp_path: Path, name: str) -> None:
    model = replace(VARIANTS[name], bos_token_id=3, eos_token_id=5, stop_token_ids=[7, 9], vocab_size=300)
    save_as_transformers(tmp_path, model, {})
    words = ["train.micro_batch_size=1", f"run.dir={tmp_path}/run", f"checkpoint.load={tmp_path}"]

    def found(*more: str) -> ModelConfig:
        return resolve_command(CommandLine((*words, *more)), FILE_SYSTEM).config.model

    assert found() == replace(model, dropout=found().dropout)
    changed = found("model.norm_eps=0.5", "model.pad_vocab_multiple=64", "model.lora.rank=2")
    assert changed == replace(found(), norm_eps=0.5, pad_vocab_multiple=64, lora=LoraConfig(rank=2))
    assert found("model=gpt2_tiny").n_layer == found("experiment=demo").n_layer == 4


def test_a_run_begins_from_a_folder_and_is_refused_in_one_go(tmp_path: Path, folder: Path) -> None:
    model = replace(LLAMA3, bos_token_id=0, eos_token_id=0, stop_token_ids=None)
    (source := tmp_path / "ours").mkdir()
    save_as_transformers(source, model, random_values(model))
    theirs = open_with_transformers(source)
    theirs.save_pretrained(tmp_path / "theirs")
    text = tmp_path / "library/0.py"
    words = [f"checkpoint.load={folder}", "checkpoint.finetune=true", "data=text", f"data.path={text}"]
    words += ["train.train_iters=1", "train.seq_length=16", "train.micro_batch_size=2", "train.global_batch_size=2"]
    words += ["schedule.lr_warmup_iters=0", "checkpoint.save_steps=0", "checkpoint.weights_dtype=float32"]
    ended = run_ok(tmp_path / "run", words)
    assert f"data.tokenizer={folder}/tokenizer.json" in ended.text
    begun = open_with_transformers(tmp_path / "run/checkpoints/weights/iter_0000000").state_dict()
    assert all(torch.equal(value, begun[name]) for name, value in theirs.state_dict().items())
    again = launch(tmp_path / "other", [*words, "model.n_layer=5", "model.rope_theta=7", "model.n_head=2"])
    for key, value in (("n_layer", 3), ("rope_theta", 100.0), ("n_head", 6)):
        assert re.search(rf"model\.{key} +saved {value} ", again.outputs[0])


def test_a_fresh_model_has_the_vocabulary_of_its_tokenizer(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for name, tokens in (("big", 270), ("small", 257)):
        (tmp_path / f"{name}.json").write_bytes(train_bpe(["a text of texts, and other texts"] * 9, tokens))

    def found(*words: str) -> tuple[int, int, int]:
        caplog.clear()
        command = CommandLine((f"run.dir={tmp_path}/run", *MODEL, *words))
        model = resolve_command(command, FILE_SYSTEM).config.model
        return model.vocab_size, model.bos_token_id, model.eos_token_id

    big = f"data.tokenizer={tmp_path}/big.json"
    assert found(*TEXTS, big) == found(big) == (270, 0, 0)
    assert caplog.messages == [
        f"model.{line}, from {big}" for line in ("vocab_size=270", "bos_token_id=0", "eos_token_id=0")
    ]
    assert found(*TEXTS, f"data.tokenizer={tmp_path}/small.json") == (257, 0, 0)
    assert found(*TEXTS, big, "model.bos_token_id=4", "checkpoint.load=none") == (270, 4, 0)
    for words in (
        *(["data.tokenizer=bytes"], [f"checkpoint.load={folder}", big], [f"checkpoint.base={folder}", big]),
        *([big, "model.vocab_size=257"], ["data=token_file", "data.train=a.bin", big]),
    ):
        assert found(*words) == (257, 256, 256)
        assert caplog.messages == []
    assert found(*TEXTS, big, "model.vocab_size=300")[0] == 300
    with refused(DataError, f"{tmp_path}/gone.json"):
        found(*TEXTS, f"data.tokenizer={tmp_path}/gone.json")
