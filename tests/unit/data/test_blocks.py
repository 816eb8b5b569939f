"""Documents in JSON are told by the name of their file; marks and empty files are no text."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from reprise.errors import DataError
from tests.bpe import train_bpe
from tests.messages import refused
from tests.unit.data.doors import of_texts, prepared, trained
from tests.unit.data.test_text_file import gzipped, zstd
from trainer.data.blocks import SplitOptions, read_blocks, split
from trainer.data.cuts import CHARACTERS
from trainer.data.sources import TextSource

DOCUMENTS = [f"document {number}, naïve and\nof two lines" for number in range(40)]
TABLES = [{"id": number, "text": text} for number, text in enumerate(DOCUMENTS)]
LINES = "".join(json.dumps(table) + "\n" for table in TABLES).encode()
PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzipped, ".zst": zstd}


@pytest.mark.parametrize("name", ["in.json", "in.json.gz", "in.jsonl", "in.ndjson.zst"])
def test_lines_are_documents_by_their_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(PACK.get(path.suffix, bytes)(LINES.replace(b'"text"', b'"content"')))
    assert prepared(tmp_path / "out", path, "--key", "content") == of_texts(*DOCUMENTS)
    with refused(DataError, "'content'", "--key"):
        trained(tmp_path, path)
    path.write_bytes(b"")
    (tmp_path / "in.txt").write_bytes(LINES)
    assert prepared(tmp_path / "out", tmp_path / "in*") == of_texts(LINES.decode())


def test_json_is_a_text_where_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "package.json"
    path.write_text(json.dumps({"name": "x", "text": "y"}, indent=2))
    with refused(DataError, "package.json, line 1", "--form text"):
        trained(tmp_path, path)
    assert prepared(tmp_path / "out", path, "--form", "text") == of_texts(path.read_text())


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("text", [b"t", "text naïve".encode(), b"some text. " * 50])
def test_a_byte_order_mark_is_no_token(tmp_path: Path, suffix: str, text: bytes) -> None:
    plain, marked = tmp_path / f"plain{suffix}", tmp_path / f"marked{suffix}"
    plain.write_bytes(PACK[suffix](text))
    marked.write_bytes(PACK[suffix](codecs.BOM_UTF8 + text))
    (tmp_path / "tokenizer.json").write_bytes(train_bpe(["some text naïve"], 260))
    for words in ((), ("--tokenizer", tmp_path / "tokenizer.json")):
        tokens = prepared(tmp_path / "out", plain, plain, *words)
        assert prepared(tmp_path / "out", marked, plain, *words) == tokens
    for fraction in (0.01, 0.25, 0.9):
        assert trained(tmp_path, marked, valid_fraction=fraction) == trained(tmp_path, plain, valid_fraction=fraction)
    assert prepared(tmp_path / "out", marked, "--tokenizer", "bytes") == of_texts(text)


def test_a_text_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc")
    for size_bytes, mtime_ns in ((4, path.stat().st_mtime_ns), (3, 1)):
        parts = split([TextSource(path, "a.txt", size_bytes, mtime_ns)], SplitOptions())["train"]
        with pytest.raises(DataError, match=r"a\.txt"):
            list(read_blocks(parts, CHARACTERS))
