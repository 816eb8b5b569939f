"""Documents in JSON are told by their content, whatever the name of their file; marks and empty files are no text."""

from __future__ import annotations

import codecs
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard

from reprise.errors import DataError
from trainer.commands.prepare_data import main
from trainer.data import json_lines
from trainer.data.corpus import prepare
from trainer.data.json_lines import is_json_lines
from trainer.data.section import DataKind, DataSection
from trainer.data.token_file import open_token_file

DOCUMENTS = [f"document {number}, naïve and\nof two lines" for number in range(40)]
LINES = "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(DOCUMENTS)).encode()
ARRAY = json.dumps([{"id": number, "text": text} for number, text in enumerate(DOCUMENTS)], indent=1).encode()
PACKAGE = json.dumps({"name": "x", "text": "y", "scripts": {}}, indent=2).encode()
PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def tokens_of(folder: Path) -> list[int]:
    paths = sorted(folder.glob("*.bin"))
    return np.concatenate([open_token_file(path).read() for path in paths]).tolist()


def of_documents(documents: list[str]) -> list[int]:
    return [token for text in documents for token in [*text.encode(), 256]]


def prepared(folder: Path, *words: str) -> list[int]:
    """Return the tokens that the command makes."""
    assert main([*words, "--output", str(folder), "--force"]) == 0
    return tokens_of(folder)


def trained(path: object, cache: Path, tokenizer: str | None = None) -> list[int]:
    """Return the training tokens, then those of validation, of a run on texts."""
    section = DataSection(kind=DataKind.text, path=str(path), tokenizer=tokenizer, valid_fraction=0.1)
    corpus = prepare(section, cache=cache)
    return [token for file in corpus.train + corpus.valid for token in open_token_file(file).read().tolist()]


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("name", ["in.json", "in.txt", "in", "in.jsonl"])
def test_lines_are_documents_whatever_their_name(tmp_path: Path, name: str, suffix: str) -> None:
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(PACK[suffix](LINES))
    assert prepared(tmp_path / "out", str(path)) == of_documents(DOCUMENTS)
    assert trained(path, tmp_path / "cache") == of_documents(DOCUMENTS)
    (tmp_path / "more").mkdir()
    (tmp_path / f"more/a{suffix}").write_bytes(PACK[suffix](LINES))
    (tmp_path / f"more/b{suffix}").write_bytes(PACK[suffix](b"plain"))
    (tmp_path / f"more/c{suffix}").write_bytes(PACK[suffix](b"plain text"))
    parts = {tuple(of_documents(DOCUMENTS)), tuple(of_documents(["plain"])), tuple(of_documents(["plain text"]))}
    tokens = trained(tmp_path / "more/*", tmp_path / "cache")
    assert sorted(tokens) == sorted(token for part in parts for token in part)


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("array", [ARRAY, json.dumps(json.loads(ARRAY)).encode(), codecs.BOM_UTF8 + ARRAY])
def test_an_array_of_documents_is_refused_with_the_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], array: bytes, suffix: str
) -> None:
    path = tmp_path / f"in.json{suffix}"
    path.write_bytes(PACK[suffix](array))
    assert main([str(path), "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"A file is an array of documents ({path})" in error
    assert f"jq -c '.[]' {path}" in error
    with pytest.raises(DataError, match="A file is an array of documents"):
        trained(path, tmp_path / "cache")
    assert prepared(tmp_path / "out", str(path), "--form", "text") == of_documents([array.decode("utf-8-sig")])


def test_the_key_tells_documents_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "in.json"
    path.write_bytes(LINES.replace(b'"text"', b'"content"'))
    assert prepared(tmp_path / "out", str(path), "--key", "content") == of_documents(DOCUMENTS)
    assert main([str(path), "--output", str(tmp_path / "other")]) == 2
    assert "only the keys ['content', 'id']" in (error := capsys.readouterr().err)
    assert "reprise prepare-data --key KEY" in error
    with pytest.raises(DataError, match=r"only the keys \['content', 'id'\]"):
        trained(path, tmp_path / "cache")
    assert prepared(tmp_path / "out", str(path), "--form", "text") == of_documents([path.read_text()])


ORDINARY = {
    "package.json": PACKAGE,
    "small.json": b'{"name": "x", "version": 1}',
    "numbers.json": b"[1, 2, 3]",
    "texts.json": b'["one", "two"]',
    "table.json": b'[{"id": 1, "name": "x"}, {"id": 2}]',
    "notebook.ipynb": json.dumps({"cells": [{"source": ["text"]}], "text": 5}).encode(),
    "deep.json": b"[" * 100_000 + b"]" * 100_000,
    "deeper.json": b'{"a":' * 100_000,
    "cut.json": b'{"text": "never ends',
    "a.js": b'{\n  const a = {"text": "b"};\n}\n',
    "b.py": b'{"text": "x"}["text"]\n',
    "c.py": b"[{'text': 'x'}]\n",
    "empty": b"",
    "blank": b"\n \n",
}


def test_ordinary_json_among_sources_is_text(tmp_path: Path) -> None:
    folder = tmp_path / "sources"
    folder.mkdir()
    for name, content in ORDINARY.items():
        (folder / name).write_bytes(content)
        assert not is_json_lines(folder / name)
    expected = of_documents([ORDINARY[name].decode() for name in sorted(ORDINARY) if name != "empty"])
    assert prepared(tmp_path / "out", f"{folder}/*") == expected
    with_end = sorted([*expected, 256])  # of the empty file
    assert sorted(trained(f"{folder}/*", tmp_path / "cache")) == with_end


def test_a_first_document_of_any_size_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in"
    for size in (9_000, 3_000_000):
        path.write_text(json.dumps({"id": "a" * size, "text": "b" * size}) + "\n")
        assert is_json_lines(path)
        path.write_text(json.dumps({"id": "a" * size}) + "\n" + json.dumps({"id": "b" * size}) + "\n")
        assert is_json_lines(path)
        path.write_text(json.dumps({"id": "a" * size}))
        assert not is_json_lines(path)
    monkeypatch.setattr(json_lines, "_BYTES", (1 << 20,))
    path.write_text(json.dumps({"id": "a" * 3_000_000, "text": "b"}) + "\n")
    assert not is_json_lines(path)


def test_documents_and_texts_together_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_bytes(LINES)
    (tmp_path / "b.json").write_bytes(PACKAGE)
    assert main([f"{tmp_path}/*.json", "--output", str(tmp_path / "out")]) == 2
    assert f"found documents in {tmp_path}/a.json, and a text in {tmp_path}/b.json" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("text", [b"", b"t", "text naïve".encode(), b"some text. " * 50, LINES])
def test_a_byte_order_mark_is_no_token(tmp_path: Path, suffix: str, text: bytes) -> None:
    for name, content in (("plain", text), ("marked", codecs.BOM_UTF8 + text)):
        (tmp_path / f"{name}{suffix}").write_bytes(PACK[suffix](content))
    marked, plain = str(tmp_path / f"marked{suffix}"), str(tmp_path / f"plain{suffix}")
    assert trained(marked, tmp_path / "cache") == trained(plain, tmp_path / "cache")
    if text:
        tokens = prepared(tmp_path / "out", plain)
        assert prepared(tmp_path / "out", marked) == tokens
        assert prepared(tmp_path / "out", marked, plain) == [*tokens, *tokens]
        trains = ["--tokenizer", "train-bpe", "260", "--workers", "1"]
        assert prepared(tmp_path / "out", marked, *trains) == prepared(tmp_path / "out", plain, *trains)
    for fraction in ("0.01", "0.25", "0.9") if text.startswith(b"some") else ():
        tokens = prepared(tmp_path / "out", marked, "--valid-fraction", fraction)
        assert bytes(token for token in tokens if token < 256) == text
        assert tokens.count(256) == 2


def test_any_bytes_have_their_mark_where_bytes_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(codecs.BOM_UTF8 + b"text")
    assert prepared(tmp_path / "out", str(tmp_path / "in"), "--tokenizer", "bytes") == [*codecs.BOM_UTF8, *b"text", 256]


def test_empty_files_among_others_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_bytes(b"text" if number < 5 else b"")
    prepared(tmp_path / "out", f"{tmp_path}/0[0-4].txt")
    assert not caplog.text
    prepared(tmp_path / "out", f"{tmp_path}/*.txt")
    assert "25 of 30 files are empty and give nothing" in caplog.text
    assert f"{tmp_path}/05.txt, " in caplog.text
    assert "24.txt and 5 more" in caplog.text
