"""Texts are encoded by the tokenizer beside weights: every kind of texts, and no file of tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reprise.errors import DataError
from tests.messages import refused
from trainer.data import corpus
from trainer.data.bpe import train_bpe
from trainer.data.byte_level import bytes_tokenizer
from trainer.data.section import DataKind, DataSection, problems
from trainer.data.sources import text_sources
from trainer.data.text import open_encoder
from trainer.data.token_file import open_token_file
from trainer.data.tokenizer_beside import tokenizer_files_in, with_tokenizer

TEXT = "# a text of texts, and of words\n" * 40


@pytest.mark.parametrize("kind", DataKind)
def test_texts_without_a_tokenizer_get_one_and_tokens_do_not(tmp_path: Path, kind: DataKind) -> None:
    is_text = kind in (DataKind.text, DataKind.stdlib)
    assert with_tokenizer(DataSection(kind=kind), {}) is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert with_tokenizer(DataSection(kind=kind), tokenizer_files_in(tmp_path)) is None
    (tmp_path / "vocab.json").write_text("{}")
    section = DataSection(kind=kind)
    if is_text:
        with refused(DataError, "data.tokenizer=PATH", "data.tokenizer=bytes"):
            with_tokenizer(section, tokenizer_files_in(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes(train_bpe([TEXT], 270))
    files = tokenizer_files_in(tmp_path)
    assert with_tokenizer(section, files) == (f"{tmp_path}/tokenizer.json" if is_text else None)
    assert with_tokenizer(replace(section, tokenizer="bytes"), files) == "bytes"
    (tmp_path / "tokenizer.json").write_bytes(bytes_tokenizer())
    assert with_tokenizer(section, files) is None


def test_the_default_corpus_has_the_tokens_of_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        (tmp_path / f"{number}.py").write_text(TEXT)
    monkeypatch.setattr(corpus, "stdlib_sources", lambda _root: text_sources(f"{tmp_path}/*.py"))
    (tmp_path / "tokenizer.json").write_bytes(train_bpe([TEXT], 300))
    counts = []
    for tokenizer in (None, "bytes", str(tmp_path / "tokenizer.json")):
        section = DataSection(kind=DataKind.stdlib, tokenizer=tokenizer)
        assert not problems(section)
        prepared, encoder = corpus.prepare(section, cache=tmp_path / "cache"), open_encoder(tokenizer)
        assert (prepared.end_of_text, prepared.vocab_size) == (encoder.end_of_text, encoder.vocab_size)
        files = [open_token_file(path).read() for path in prepared.train + prepared.valid]
        tokens = np.concatenate(files)
        assert encoder.decode(tokens[tokens != encoder.end_of_text].tolist()) == 3 * TEXT
        counts.append(tokens.size)
    assert counts[0] == counts[1] > counts[2]
