"""Documents in JSON are told by their content, whatever the name of their file; marks and empty files are no text."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from reprise.errors import DataError
from tests.messages import refused
from tests.unit.data.doors import of_texts, prepared, trained
from tests.unit.data.test_text_file import gzipped, zstd
from trainer.commands.prepare_data import main
from trainer.data import blocks
from trainer.data.blocks import SplitOptions, is_json_lines, read_blocks, split
from trainer.data.cuts import CHARACTERS
from trainer.data.sources import TextSource

DOCUMENTS = [f"document {number}, naïve and\nof two lines" for number in range(40)]
TABLES = [{"id": number, "text": text} for number, text in enumerate(DOCUMENTS)]
LINES = "".join(json.dumps(table) + "\n" for table in TABLES).encode()
PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzipped, ".zst": zstd}


@pytest.mark.parametrize("name", ["in.json", "in.txt.gz", "in.zst", "in", "in.jsonl.gz", "in.ndjson.zst"])
def test_lines_are_documents_whatever_their_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    pack = PACK.get(path.suffix, bytes)
    path.write_bytes(pack(LINES))
    assert prepared(tmp_path / "out", path) == of_texts(*DOCUMENTS)
    (tmp_path / "more").mkdir()
    for number, data in enumerate([LINES, b"plain", b"plain text", b""]):
        (tmp_path / f"more/{number}{path.suffix}").write_bytes(pack(data))
    assert prepared(tmp_path / "out", tmp_path / "more/*") == of_texts(*DOCUMENTS, "plain", "plain text", "")


def test_the_key_tells_documents_too(tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    path.write_bytes(LINES.replace(b'"text"', b'"content"'))
    assert prepared(tmp_path / "out", path, "--key", "content") == of_texts(*DOCUMENTS)
    assert prepared(tmp_path / "out", path) == of_texts(path.read_text())
    with refused(DataError, "'content'", "--key"):
        trained(tmp_path, path.rename(tmp_path / "in.jsonl"))


ORDINARY = {
    "package.json": json.dumps({"name": "x", "text": "y", "scripts": {}}, indent=2).encode(),
    "small.json": b'{"name": "x", "version": 1}',
    "table.json": b'[{"id": 1, "text": "x"}, {"id": 2}]',
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
    expected = [ORDINARY[name] for name in sorted(ORDINARY)]
    assert prepared(tmp_path / "out", f"{folder}/*") == of_texts(*expected)
    assert not caplog.text
    (folder / "empty").touch()
    assert sorted(prepared(tmp_path / "out", f"{folder}/*")) == sorted(of_texts(*expected, ""))
    assert f"{folder}/empty" in caplog.text


def test_a_first_document_of_any_size_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in"
    for size in (9_000, 3_000_000):
        lines = [json.dumps({"id": "a" * size}), json.dumps({"id": "b" * size, "text": "c"})]
        for text, expected in ((lines[1], True), ("\n".join(lines[::-1]), True), ("\n".join(lines), False)):
            path.write_text(text)
            assert is_json_lines(path) is expected
    monkeypatch.setattr(blocks, "_MOST_FIRST_LINE", 1 << 20)
    path.write_text(lines[1])
    assert not is_json_lines(path)


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("text", [b"t", "text naïve".encode(), b"some text. " * 50, LINES])
def test_a_byte_order_mark_is_no_token(tmp_path: Path, suffix: str, text: bytes) -> None:
    plain, marked = tmp_path / f"plain{suffix}", tmp_path / f"marked{suffix}"
    plain.write_bytes(PACK[suffix](text))
    marked.write_bytes(PACK[suffix](codecs.BOM_UTF8 + text))
    for words in ((), ("--tokenizer", "train-bpe", "260")):
        tokens = prepared(tmp_path / "out", plain, plain, *words)
        assert prepared(tmp_path / "out", marked, plain, *words) == tokens
    for fraction in (0.01, 0.25, 0.9):
        assert trained(tmp_path, marked, valid_fraction=fraction) == trained(tmp_path, plain, valid_fraction=fraction)
    assert main([str(marked), "--output", str(tmp_path / "out"), "--tokenizer", "bytes", "--force"]) == 0


def test_a_text_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc")
    for size_bytes, mtime_ns in ((4, path.stat().st_mtime_ns), (3, 1)):
        parts = split([TextSource(path, "a.txt", size_bytes, mtime_ns)], SplitOptions())["train"]
        with pytest.raises(DataError, match=r"a\.txt"):
            list(read_blocks(parts, CHARACTERS))
