"""Files of text by their first bytes: the tokens of the plain file, however it is packed, and nothing else trains."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import sys
import tarfile
import tracemalloc
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from reprise.errors import DataError
from tests.messages import refused
from tests.unit.data.doors import content, of_texts, prepared, prose, trained
from trainer.data import text_file
from trainer.data.prepared import PrepareOptions, write_prepared
from trainer.data.sources import text_sources
from trainer.data.text_file import read_text

SKIPPABLE = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"  # a frame that pzstd writes first


def gzipped(data: bytes) -> bytes:
    """Return the data as two members, as `cat a.gz b.gz` makes them."""
    half = len(data) // 2
    return gzip.compress(data[:half]) + gzip.compress(b"") + gzip.compress(data[half:])


def zstd(data: bytes) -> bytes:
    """Return the data as two frames, one with its size and one with a checksum, behind one to skip."""
    half = len(data) // 2
    checked = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False)
    return SKIPPABLE + zstandard.compress(data[:half]) + checked.compress(data[half:])


def table(texts: list[Any], key: str = "text", **options: object) -> bytes:
    file = io.BytesIO()
    columns = {"id": list(range(len(texts))), key: texts}
    parquet.write_table(pa.table(columns), file, row_group_size=7, **options)
    return file.getvalue()


def test_parquet_of_any_name_gives_the_files_of_plain_lines(tmp_path: Path) -> None:
    texts = [prose(60, seed) for seed in range(50)] + ["", "one\nline", 'a "quote" \\ and \x01']
    (tmp_path / "plain.jsonl").write_text("".join(json.dumps({"content": text}) + "\n" for text in texts))
    (tmp_path / "table").write_bytes(table(texts, "content"))
    (tmp_path / "bytes").write_bytes(table([text.encode() for text in texts], "content"))
    words = ("--key", "content")
    for name in ("plain.jsonl", "table", "bytes"):
        assert prepared(tmp_path / "all", tmp_path / name, *words) == of_texts(*texts)
        prepared(tmp_path / f"of {name}", tmp_path / name, *words, "--valid-fraction", 0.3, "--file-tokens", 5000)
    assert content(tmp_path / "of plain.jsonl") == content(tmp_path / "of table")


TEXT = b"A text that is long enough to be one. " * 20
PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)
BINARY = {
    "xz": (lzma.compress(TEXT), "in.txt, byte"),
    "bzip2": (bz2.compress(TEXT), "in.txt, byte"),
    "zip": (b"PK\3\4\x14\0" + TEXT, "in.txt, byte 5"),
    "tar": (tarfile.TarInfo("a.txt").tobuf() + TEXT, "a NUL byte"),
    "PNG": (PNG, "a NUL byte"),
    "PDF": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "in.txt, byte 10"),
    "pickle": (pickle.dumps([1, "a"]), "a NUL byte"),
    "NumPy": (np.lib.format.magic(1, 0) + TEXT, "--raw"),
    "UTF-16": ("Grüße".encode("utf-16"), "iconv -f UTF-16"),
    "UTF-16 without a mark": ("Hello".encode("utf-16-le"), "in.txt, byte 1"),
    "Latin-1": (TEXT * 900 + "Grüße".encode("latin-1"), "in.txt, byte 684002"),
    "a cut character": (TEXT + "ü".encode()[:1], "in.txt, byte 760"),
}


@pytest.mark.parametrize("name", BINARY)
def test_a_file_that_is_no_text_is_refused_with_advice(tmp_path: Path, name: str) -> None:
    data, word = BINARY[name]
    path = tmp_path / "in.txt"
    for packed in (data, gzip.compress(data), zstandard.compress(data)):
        path.write_bytes(packed)
        with refused(DataError, "in.txt", word):
            write_prepared(tmp_path / "out", text_sources(str(path)), PrepareOptions(), workers=1)
        assert not (tmp_path / "out").exists()


def test_a_nul_behind_the_first_piece_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_file, "BLOCK_BYTES", 100)
    (tmp_path / "in").write_bytes(b"word" * 1000 + b"\0")
    with refused(DataError, "in, byte 4000"):
        trained(tmp_path, tmp_path / "in")


LONG = prose(20_000).encode()
DAMAGED = {
    "gzip cut off": gzip.compress(LONG)[:-9],
    "gzip with another sum": gzip.compress(LONG)[:-8] + bytes(8),
    "gzip with garbage behind": gzip.compress(LONG) + b"garbage",
    "zstd cut off": zstandard.compress(LONG)[:-1],
    "zstd cut off in its second frame": zstd(LONG)[:-1],
    "zstd with garbage behind": zstandard.compress(LONG) + b"garbage",
    "zstd with another byte": zstd(LONG)[:-30] + b"\xff" * 30,
    "parquet cut off": table([prose(100)] * 50)[:-1],
    "parquet with other bytes": (lambda data: data[:300] + b"\xff" * 200 + data[500:])(table([prose(999)] * 50)),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    (tmp_path / "in.txt").write_bytes(DAMAGED[case])
    with refused(DataError, "in.txt"):
        sources = text_sources(f"{tmp_path}/in.txt")
        write_prepared(tmp_path / "out", sources, PrepareOptions(), workers=1)
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


@pytest.mark.parametrize(
    ("rows", "missing", "words"),
    [
        (zstd(TEXT), "zstandard", ("zstandard", "pip install zstandard")),
        (table(["a"]), "pyarrow", ("pyarrow", "pip install pyarrow")),
        (table(["a", None]), "", ("in, line 2", "'text'")),
        (table([1, 2]), "", ("in, line 1", "'int'")),
        (table(["a"], "body"), "", ("'id', 'body'",)),
        (table([b"a", b"\xff"]), "", ("in, line 2", "xff")),
        (table([datetime(2026, 1, 1)]), "", ("in, line 1", "'text'")),
    ],
    ids=["no zstandard", "no pyarrow", "null", "number", "other key", "bytes", "time"],
)
def test_rows_and_forms_that_cannot_be_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: bytes, missing: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "in").write_bytes(rows)
    monkeypatch.setitem(sys.modules, missing, None)
    with refused(DataError, *words):
        trained(tmp_path, tmp_path / "in")


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_bomb_takes_the_memory_of_a_few_blocks(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    (tmp_path / "in").write_bytes(pack(b"bomb-" * (32 << 20)))
    tracemalloc.start()
    try:
        size = sum(map(len, read_text(tmp_path / "in")))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size == 5 * (32 << 20)
    assert peak < 64 << 20
