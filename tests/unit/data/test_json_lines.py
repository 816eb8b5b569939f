"""Documents in JSON are told by their content, whatever the name of their file; marks and empty files are no text."""

from __future__ import annotations

import codecs
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from reprise.errors import DataError
from tests.messages import refused
from tests.unit.data.doors import prepared, trained
from trainer.commands.prepare_data import main
from trainer.data import json_lines
from trainer.data.json_lines import is_json_lines

DOCUMENTS = [f"document {number}, naïve and\nof two lines" for number in range(40)]
LINES = "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(DOCUMENTS)).encode()
ARRAY = json.dumps([{"id": number, "text": text} for number, text in enumerate(DOCUMENTS)], indent=1).encode()
PACKAGE = json.dumps({"name": "x", "text": "y", "scripts": {}}, indent=2).encode()
PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def of_documents(documents: list[str]) -> list[int]:
    return [token for text in documents for token in [*text.encode(), 256]]


@pytest.mark.parametrize("name", ["in.json", "in.txt.gz", "in.zst", "in", "in.jsonl.gz"])
def test_lines_are_documents_whatever_their_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    pack = PACK.get(path.suffix, bytes)
    path.write_bytes(pack(LINES))
    assert prepared(tmp_path / "out", path) == of_documents(DOCUMENTS)
    share = prepared(tmp_path / "out", path, "--valid-fraction", "0.05")
    assert trained(tmp_path, path) == share
    assert sorted(share) == sorted(of_documents(DOCUMENTS))
    (tmp_path / "more").mkdir()
    others = ["plain", "plain text"]
    for number, data in enumerate([LINES, *(text.encode() for text in others)]):
        (tmp_path / f"more/{number}{path.suffix}").write_bytes(pack(data))
    assert sorted(trained(tmp_path, tmp_path / "more/*")) == sorted(of_documents([*DOCUMENTS, *others]))


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("array", [ARRAY, json.dumps(json.loads(ARRAY)).encode(), codecs.BOM_UTF8 + ARRAY])
def test_an_array_of_documents_is_refused_with_the_cure(tmp_path: Path, array: bytes, suffix: str) -> None:
    path = tmp_path / f"in.json{suffix}"
    path.write_bytes(PACK[suffix](array))
    with refused(DataError, f"jq -c '.[]' {path}"):
        trained(tmp_path, path)
    assert main([str(path), "--output", str(tmp_path / "out")]) == 2
    assert prepared(tmp_path / "out", path, "--form", "text") == of_documents([array.decode("utf-8-sig")])


def test_the_key_tells_documents_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "in.json"
    path.write_bytes(LINES.replace(b'"text"', b'"content"'))
    assert prepared(tmp_path / "out", path, "--key", "content") == of_documents(DOCUMENTS)
    assert main([str(path), "--output", str(tmp_path / "other")]) == 2
    assert "['content', 'id']" in capsys.readouterr().err
    with refused(DataError, "['content', 'id']", "--key"):
        trained(tmp_path, path)
    assert prepared(tmp_path / "out", path, "--form", "text") == of_documents([path.read_text()])


ORDINARY = {
    "package.json": PACKAGE,
    "small.json": b'{"name": "x", "version": 1}',
    "numbers.json": b"[1, 2, 3]",
    "texts.json": b'["one", "two"]',
    "table.json": b'[{"id": 1, "name": "x"}, {"id": 2}]',
    "notebook.ipynb": b'{"cells": [{"source": ["text"]}], "text": 5}',
    "deep.json": b"[" * 100_000 + b"]" * 100_000,
    "deeper.json": b'{"a":' * 100_000,
    "cut.json": b'{"text": "never ends',
    "a.js": b'{\n  const a = {"text": "b"};\n}\n',
    "b.py": b'{"text": "x"}["text"]\n',
    "c.py": b"[{'text': 'x'}]\n",
    "blank": b"\n \n",
}


def test_ordinary_json_among_sources_is_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "sources"
    folder.mkdir()
    for name, content in ORDINARY.items():
        (folder / name).write_bytes(content)
        assert not is_json_lines(folder / name)
    expected = of_documents([ORDINARY[name].decode() for name in sorted(ORDINARY)])
    assert prepared(tmp_path / "out", f"{folder}/*") == expected
    assert not caplog.text
    (folder / "empty").touch()
    assert sorted(prepared(tmp_path / "out", f"{folder}/*")) == sorted([*expected, 256])
    assert f"{folder}/empty" in caplog.text
    assert sorted(trained(tmp_path, f"{folder}/*")) == sorted([*expected, 256])


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


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("text", [b"t", "text naïve".encode(), b"some text. " * 50, LINES])
def test_a_byte_order_mark_is_no_token(tmp_path: Path, suffix: str, text: bytes) -> None:
    plain, marked = tmp_path / f"plain{suffix}", tmp_path / f"marked{suffix}"
    plain.write_bytes(PACK[suffix](text))
    marked.write_bytes(PACK[suffix](codecs.BOM_UTF8 + text))
    assert trained(tmp_path, marked) == trained(tmp_path, plain)
    tokens = prepared(tmp_path / "out", plain)
    assert prepared(tmp_path / "out", marked, plain) == [*tokens, *tokens]
    trains = ["--tokenizer", "train-bpe", "260"]
    assert prepared(tmp_path / "out", marked, *trains) == prepared(tmp_path / "out", plain, *trains)
    for fraction in ("0.01", "0.25", "0.9") if text.startswith(b"some") else ():
        tokens = prepared(tmp_path / "out", marked, "--valid-fraction", fraction)
        assert bytes(token for token in tokens if token < 256) == text
        assert tokens.count(256) == 2
