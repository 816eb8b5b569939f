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
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from reprise.errors import DataError
from tests.bpe import train_bpe
from tests.messages import refused
from trainer.data.byte_level import bytes_tokenizer
from trainer.data.section import DataKind, DataSection
from trainer.data.text import bytes_encoder, open_encoder, prompt_tokens
from trainer.data.tokenizer_beside import tokenizer_files_in, with_tokenizer
from trainer.data.tokenizer_files import tokenizer_files

THEIRS = Tokenizer.from_buffer(bytes_tokenizer())
TEXT = DataSection(kind=DataKind.text, path="x")
TOKENS = DataSection(kind=DataKind.token_file, train="x")


def files(section: DataSection, *, rows: int = 300, bos: int = 256, eos: int = 256) -> dict[str, bytes]:
    return tokenizer_files(section, rows=rows, bos=bos, eos=eos, positions=32)


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
    assert files(TOKENS) == {}, "no tokenizer is named"


def test_nothing_that_is_saved_needs_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = written(tmp_path)
    saved = tmp_path / "tokenizer.json"
    saved.write_bytes(bytes_tokenizer())
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert files(section, eos=0)["tokenizer.json"] == Path(str(section.tokenizer)).read_bytes()
    assert open_encoder(saved).label == bytes_encoder().label
    with refused(DataError, "pip install tokenizers"):
        open_encoder(str(section.tokenizer))


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_copy_gives_the_tokens_that_the_run_trains_on(tmp_path: Path, *, is_nested: bool) -> None:
    """It neither adds a token, nor truncates, pads or drops out."""
    section = written(tmp_path)
    theirs = Tokenizer.from_file(str(section.tokenizer))
    ids = theirs.encode("so it is, and so it is").ids
    end = "<|endoftext|>"
    adds = tokenizers.processors.TemplateProcessing(single=f"{end} $A", pair=f"{end} $A $B", special_tokens=[(end, 0)])
    level = tokenizers.processors.ByteLevel()
    theirs.post_processor = tokenizers.processors.Sequence([level, adds]) if is_nested else adds
    assert theirs.encode("so").ids[0] == 0
    theirs.enable_truncation(3)
    theirs.enable_padding(length=40)
    theirs.model.dropout = 0.9
    theirs.save(str(section.tokenizer))
    digest = xxhash.xxh3_64_hexdigest(Path(str(section.tokenizer)).read_bytes())
    assert digest in open_encoder(section.tokenizer).label, "the cache is named after the file"
    content = files(section, eos=0)["tokenizer.json"]
    copy = Tokenizer.from_buffer(content)
    assert [copy.encode("so it is, and so it is").ids for _ in range(9)] == [ids] * 9
    assert prompt_tokens(open_encoder(section.tokenizer), "so it is, and so it is", 300) == ids
    Path(str(section.tokenizer)).write_bytes(content)
    assert files(section, eos=0)["tokenizer.json"] == content


def test_only_a_special_token_is_named_as_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    section = written(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert config(section, bos=0, eos=0)["eos_token"] == "<|endoftext|>"
        assert not caplog.records
        found = config(section, bos=0, eos=256)
    assert "eos_token" not in found
    assert found["bos_token"] == "<|endoftext|>"
    assert "model.eos_token_id=256" in caplog.text
    assert "whose end of text is <|endoftext|>" in caplog.text
    assert "set model.bos_token_id and model.eos_token_id" in caplog.text


def vocabulary(folder: Path, *, special: str, eos: object = None) -> DataSection:
    """Write a tokenizer with an ordinary `</s>` of id 0 and a special token of id 1, and perhaps its configuration."""
    table = Tokenizer(WordLevel({"</s>": 0, special: 1, "<eos>": 2}, "</s>"))
    table.add_special_tokens([special])
    table.save(str(folder / "tokenizer.json"))
    if eos is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return replace(TEXT, tokenizer=str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("special", "eos", "expected"),
    [
        ("<|end_of_text|>", None, 1),
        ("<|endoftext|>", None, 1),
        ("<pad>", None, 0),
        ("<|im_end|>", "<|im_end|>", 1),
        ("<|endoftext|>", "<eos>", 2),
        ("<|endoftext|>", {"content": "<eos>", "special": True}, 2),
        ("<|endoftext|>", "</s>", 0),
    ],
)
def test_a_text_ends_as_configured_or_with_a_special_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, special: str, eos: object, expected: int
) -> None:
    section = vocabulary(tmp_path, special=special, eos=eos)
    encoder = open_encoder(section.tokenizer)
    assert encoder.end_of_text == expected
    assert prompt_tokens(encoder, "", 3) == [expected]
    saved = config(section, eos=expected)
    end = ("</s>", special, "<eos>")[expected]
    assert saved["eos_token"] == end
    files(section, eos=7)
    assert f"whose end of text is {end}" in caplog.text
    # What is saved beside a checkpoint ends texts in the same way.
    for name, content in files(section, eos=expected).items():
        (tmp_path / name).write_bytes(content)
    assert open_encoder(section.tokenizer).end_of_text == expected


@pytest.mark.parametrize("eos", ["<none>", 3, ["</s>"], {"text": "</s>"}])
def test_an_end_of_text_that_no_token_is_is_refused(tmp_path: Path, eos: object) -> None:
    section = vocabulary(tmp_path, special="<|endoftext|>", eos=eos)
    for open_it in (lambda: open_encoder(section.tokenizer), lambda: files(section)):
        with refused(DataError, "tokenizer_config.json"):
            open_it()


def test_a_configuration_belongs_to_the_tokenizer_of_its_name(tmp_path: Path) -> None:
    section = vocabulary(tmp_path, special="<|endoftext|>", eos="<eos>")
    path = Path(str(section.tokenizer))
    copy = path.with_name("tokenizer.0123.json")
    copy.write_bytes(path.read_bytes())
    assert open_encoder(copy).end_of_text == 1
    path.with_name("tokenizer_config.json").rename(path.with_name("tokenizer.0123_config.json"))
    assert open_encoder(copy).end_of_text == 2


@pytest.mark.parametrize("kind", ["bpe", "added", "unigram"])
def test_a_tokenizer_with_more_tokens_than_rows_is_refused(tmp_path: Path, kind: str) -> None:
    table = json.loads(train_bpe(["so it is\n"] * 9, 257))
    if kind == "added":
        table["added_tokens"].append({**table["added_tokens"][0], "id": 299, "content": "<pad>"})
    elif kind == "bpe":
        table["model"]["vocab"]["soit"] = 299
    else:
        table["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [[f"{number}", -1.0] for number in range(300)]}
        table["model"]["byte_fallback"] = False
    section = written(tmp_path, table)
    for data in (section, replace(TOKENS, tokenizer=section.tokenizer)):
        assert files(data, rows=300, eos=0)
        with refused(DataError, "model.vocab_size", "300", "299"):
            files(data, rows=299, eos=0)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"added_tokens": [{"id": "x", "special": true}]}', "\xff", "7"])
def test_what_is_no_tokenizer_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content.encode("latin-1"))
    with refused(DataError, "tokenizer.json", "data.tokenizer"):
        files(replace(TOKENS, tokenizer=str(path)))
    os.mkfifo(tmp_path / "pipe")
    os.truncate(path, 65 << 20)  # none of these is read
    for name in ("pipe", path.name, "none"):
        for open_it in (lambda path: files(replace(TOKENS, tokenizer=path)), open_encoder):
            with pytest.raises(DataError, match=name):
                open_it(str(tmp_path / name))


@pytest.mark.parametrize("kind", DataKind)
def test_texts_without_a_tokenizer_get_that_beside_weights(tmp_path: Path, kind: DataKind) -> None:
    section, is_text = DataSection(kind=kind), kind in (DataKind.text, DataKind.stdlib)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for beside in ({}, tokenizer_files_in(tmp_path)):
        assert with_tokenizer(section, beside) is None
    (tmp_path / "vocab.json").write_text("{}")
    if is_text:
        with refused(DataError, "data.tokenizer=PATH", "data.tokenizer=bytes"):
            with_tokenizer(section, tokenizer_files_in(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes(train_bpe(["so it is"], 270))
    beside = tokenizer_files_in(tmp_path)
    assert with_tokenizer(section, beside) == (f"{tmp_path}/tokenizer.json" if is_text else None)
    assert with_tokenizer(replace(section, tokenizer="bytes"), beside) == "bytes"
    (tmp_path / "tokenizer.json").write_bytes(bytes_tokenizer())
    assert with_tokenizer(section, beside) is None
