"""The files of a run's tokenizer: the same tokens, made without the `tokenizers` package."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from reprise.errors import DataError
from trainer.data.bpe import train_bpe
from trainer.data.byte_level import bytes_tokenizer
from trainer.data.section import DataKind, DataSection
from trainer.data.text import bytes_encoder, open_encoder, prompt_tokens
from trainer.data.tokenizer_files import tokenizer_files

THEIRS = tokenizers.Tokenizer.from_buffer(bytes_tokenizer())
TEXT = DataSection(kind=DataKind.text, path="x")
TOKENS = DataSection(kind=DataKind.token_file, train="x")


def files(section: DataSection, *, bos: int = 256, eos: int = 256) -> dict[str, bytes]:
    return tokenizer_files(section, bos=bos, eos=eos, positions=32)


def config(section: DataSection, *, bos: int = 256, eos: int = 256) -> dict[str, object]:
    found: dict[str, object] = json.loads(files(section, bos=bos, eos=eos)["tokenizer_config.json"])
    return found


def written(folder: Path, table: dict[str, object] | None = None) -> DataSection:
    """Write a tokenizer whose end of text is 0, with members in the place of its own, and return a section of it."""
    path = folder / "any name.json"
    path.write_text(json.dumps({**json.loads(train_bpe(["so it is\n"] * 9, 270)), **(table or {})}))
    return replace(TEXT, tokenizer=str(path))


@given(st.text())
def test_tokens_of_a_text_are_its_bytes(text: str) -> None:
    if "<|endoftext|>" not in text:
        assert THEIRS.encode(text, add_special_tokens=False).ids == list(text.encode())


@given(st.lists(st.integers(0, 256)))
def test_any_tokens_decode_to_the_same_text(tokens: list[int]) -> None:
    assert THEIRS.decode(tokens, skip_special_tokens=False) == bytes_encoder().decode(tokens)


@pytest.mark.parametrize("section", [DataSection(), TEXT, replace(TOKENS, tokenizer="bytes")], ids=lambda s: s.kind)
def test_a_run_on_bytes_saves_the_tokenizer_of_bytes(section: DataSection) -> None:
    assert files(section)["tokenizer.json"] == bytes_tokenizer()
    assert (config(section)["eos_token"], config(section)["model_max_length"]) == ("<|endoftext|>", 32)


def test_token_files_whose_tokenizer_is_not_named_save_none() -> None:
    assert files(TOKENS) == {}


def test_nothing_that_is_saved_needs_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = written(tmp_path)
    saved = tmp_path / "tokenizer.json"
    saved.write_bytes(bytes_tokenizer())
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert files(section, eos=0)["tokenizer.json"] == Path(str(section.tokenizer)).read_bytes()
    assert open_encoder(saved).label == bytes_encoder().label
    with pytest.raises(DataError, match="tokenizers package"):
        open_encoder(str(section.tokenizer))


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_copy_adds_no_token_that_the_run_does_not_train_on(tmp_path: Path, *, is_nested: bool) -> None:
    end = "<|endoftext|>"
    single = [{"SpecialToken": {"id": end, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    adds = {"type": "TemplateProcessing", "single": single, "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}]}
    adds["special_tokens"] = {end: {"id": end, "ids": [0], "tokens": [end]}}
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    processor = {"type": "Sequence", "processors": [level, adds]} if is_nested else adds
    section = written(tmp_path, {"post_processor": processor})
    theirs, ours = Path(str(section.tokenizer)).read_bytes(), files(section, eos=0)["tokenizer.json"]
    ids = prompt_tokens(open_encoder(section.tokenizer), "so", 300)
    assert tokenizers.Tokenizer.from_buffer(theirs).encode("so").ids[0] == 0
    assert tokenizers.Tokenizer.from_buffer(ours).encode("so").ids == ids
    assert json.loads(ours) == {**json.loads(theirs), "post_processor": None}


def test_only_a_special_token_is_named_as_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    section = written(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert config(section, bos=0, eos=0)["eos_token"] == "<|endoftext|>"
        assert not caplog.records
        found = config(section, bos=0, eos=256)
    assert "eos_token" not in found
    assert found["bos_token"] == "<|endoftext|>"
    assert "model.eos_token_id=256" in caplog.text
    assert "0 (<|endoftext|>)" in caplog.text


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"added_tokens": [{"id": "x", "special": true}]}', "\xff", "7"])
def test_what_is_no_tokenizer_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=r"(?s)cannot be saved beside the model \(.*tokenizer\.json\).*data\.tokenizer"):
        files(replace(TOKENS, tokenizer=str(path)))


def test_a_pipe_and_a_file_that_is_too_large_are_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(65 << 20)
    for name, found in (("pipe", "not a regular file"), ("large", "larger than"), ("none", "No such file")):
        with pytest.raises(DataError, match=found):
            files(replace(TOKENS, tokenizer=str(tmp_path / name)))
        with pytest.raises(DataError, match=found):
            open_encoder(tmp_path / name)
