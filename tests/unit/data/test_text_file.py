"""Files of text by their first bytes: the tokens of the plain file, however it is packed, and nothing else trains."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import random
import sys
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from reprise.errors import DataError
from trainer.commands.prepare_data import main
from trainer.data import blocks, text_file
from trainer.data.blocks import TextForm, read_blocks
from trainer.data.corpus import Corpus, prepare
from trainer.data.cuts import LINES
from trainer.data.prepared import PrepareOptions, write_prepared
from trainer.data.section import DataKind, DataSection
from trainer.data.text_file import Span, open_text
from trainer.data.token_file import open_token_file

WORDS = ["checkpoint", "wörter", "日本語。", "it's", "1234567", "...\n\n", "  ", "\t", "\r\n", "🙂", "Zeile\n"]
SKIPPABLE = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"  # a frame that pzstd writes first


def prose(count: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(count))


def gzipped(data: bytes) -> bytes:
    """Return the data as two members, as `cat a.gz b.gz` makes them."""
    half = len(data) // 2
    return gzip.compress(data[:half]) + gzip.compress(b"") + gzip.compress(data[half:])


def zstd(data: bytes) -> bytes:
    """Return the data as two frames, one with its size and one with a checksum, behind one to skip."""
    half = len(data) // 2
    checked = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False)
    return SKIPPABLE + zstandard.compress(data[:half]) + checked.compress(data[half:])


def table(texts: list[str], key: str = "text", **options: object) -> bytes:
    file = io.BytesIO()
    columns = {"id": list(range(len(texts))), key: texts}
    parquet.write_table(pa.table(columns), file, row_group_size=7, **options)
    return file.getvalue()


PACKED: dict[str, Callable[[bytes], bytes]] = {"gz": gzipped, "zst": zstd}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("kind", [DataKind.token_file, DataKind.megatron])
def test_compressed_texts_give_the_files_of_plain_ones(tmp_path: Path, suffix: str, kind: DataKind) -> None:
    for count in (1, 4):
        plain = [tmp_path / f"{number}.txt" for number in range(count)]
        packed = [tmp_path / f"{number}.txt.{suffix}" for number in range(count)]
        for number, (path, other) in enumerate(zip(plain, packed, strict=True)):
            path.write_text(prose(2000, seed=number), newline="")
            other.write_bytes(PACKED[suffix](path.read_bytes()))
        options = PrepareOptions(TextForm.text, train_vocab_size=300, valid_fraction=0.4, block_bytes=700, kind=kind)
        write_prepared(tmp_path / f"plain{count}", plain, options, workers=1)
        write_prepared(tmp_path / f"packed{count}", packed, options, workers=1)
        found = content(tmp_path / f"plain{count}")
        assert {"train_000000.bin", "valid_000000.bin"} < set(found)
        assert found == content(tmp_path / f"packed{count}")


@pytest.mark.parametrize("suffix", ["jsonl.gz", "ndjson.zst", "parquet", "without"])
def test_documents_give_the_files_of_plain_lines(tmp_path: Path, suffix: str) -> None:
    texts = [prose(60, seed) for seed in range(50)] + ["", "one\nline", 'a "quote" \\ and \x01']
    lines = "".join(json.dumps({"content": text}) + "\n" for text in texts).encode()
    (tmp_path / "in.jsonl").write_bytes(lines)
    named = tmp_path / ("in" if suffix == "without" else f"in.{suffix}")  # the name is no matter for Parquet
    named.write_bytes(PACKED[suffix[-3:].strip(".")](lines) if "." in suffix else table(texts, "content"))
    shared = ["--key", "content", "--valid-fraction", "0.3", "--file-tokens", "5000", "--workers", "1"]
    for path, out in ((tmp_path / "in.jsonl", "plain"), (named, "packed")):
        assert main([str(path), "--output", str(tmp_path / out), *shared]) == 0
    assert content(tmp_path / "plain") == content(tmp_path / "packed")


def section(path: object, **keys: object) -> DataSection:
    return replace(DataSection(kind=DataKind.text, path=str(path), valid_fraction=0.3), **keys)


def contents(corpus: Corpus) -> list[bytes]:
    return [path.read_bytes() for path in corpus.train + corpus.valid]


@pytest.mark.parametrize("suffix", PACKED)
def test_a_run_reads_compressed_texts_as_plain_ones(tmp_path: Path, suffix: str) -> None:
    for number in range(5):
        text = prose(200, seed=number).encode()
        (tmp_path / f"{number}.txt").write_bytes(text)
        (tmp_path / f"{number}.txt.{suffix}").write_bytes(PACKED[suffix](text))
    for pattern in ("0.txt", "?.txt"):
        plain = prepare(section(tmp_path / pattern), cache=tmp_path / "cache")
        packed = prepare(section(tmp_path / f"{pattern}.{suffix}"), cache=tmp_path / "cache")
        assert contents(plain) == contents(packed)


def test_a_run_reads_the_rows_of_parquet_as_documents(tmp_path: Path) -> None:
    texts = [prose(5, seed) for seed in range(10)]
    (tmp_path / "a.parquet").write_bytes(table(texts))
    corpus = prepare(section(tmp_path / "a.parquet"), cache=tmp_path / "cache")
    for paths, part in ((corpus.train, texts[:7]), (corpus.valid, texts[7:])):
        expected = [token for text in part for token in [*text.encode(), 256]]
        assert open_token_file(paths[0]).read().tolist() == expected
    for number in range(3):
        (tmp_path / f"{number}.pq").write_bytes(table(texts[number:]))
        (tmp_path / f"{number}.txt").write_text("\n")
    several = prepare(section(tmp_path / "?.pq"), cache=tmp_path / "cache")
    tokens = [open_token_file(path).read().tolist() for path in several.train + several.valid]
    assert sum(part.count(256) for part in tokens) == 10 + 9 + 8
    (tmp_path / "b.parquet").write_bytes(table(texts, "body"))
    with pytest.raises(DataError, match=r"column 'text'.*the columns id, body.*--key COLUMN"):
        prepare(section(tmp_path / "b.parquet"), cache=tmp_path / "cache")


def tar(data: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def zipped(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", data)
    return file.getvalue()


def numpy_file() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(9))
    return file.getvalue()


TEXT = b"A text that is long enough to be one. " * 20
BINARY: dict[str, tuple[bytes, str]] = {
    "xz": (lzma.compress(TEXT), r"in\.txt.*found xz.*xz --decompress"),
    "bzip2": (bz2.compress(TEXT), r"in\.txt.*found bzip2.*bzip2 --decompress"),
    "zip": (zipped(TEXT), r"in\.txt.*found zip.*unzip"),
    "tar": (tar(TEXT), r"in\.txt.*found tar.*tar -xf"),
    "PNG": (b"\x89PNG\r\n\x1a\n" + bytes(100), r"in\.txt.*found PNG"),
    "PDF": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", r"in\.txt.*found PDF.*pdftotext"),
    "pickle": (pickle.dumps([1, "a"]), r"in\.txt.*found pickle"),
    "NumPy": (numpy_file(), r"in\.txt.*found NumPy.*--raw"),
    "safetensors": (b'\x40\0\0\0\0\0\0\0{"a":{"dtype":"F32"}}', r"in\.txt.*found safetensors"),
    "UTF-16": ("Grüße".encode("utf-16"), r"in\.txt.*found UTF-16.*iconv -f UTF-16"),
    "UTF-16 without a mark": ("Hello".encode("utf-16-le"), r"in\.txt.*found binary"),
    "Latin-1": (TEXT * 900 + "Grüße".encode("latin-1"), r"not UTF-8.*in\.txt, byte 684002.*0xfc.*iconv"),
    "a cut character": (TEXT + "ü".encode()[:1], r"not UTF-8.*in\.txt, byte 760"),
}


@pytest.mark.parametrize("name", BINARY)
def test_a_file_that_is_no_text_is_refused_with_advice(tmp_path: Path, name: str) -> None:
    data, message = BINARY[name]
    path, options = tmp_path / "in.txt", PrepareOptions(TextForm.text)
    for packed in (data, gzip.compress(data), zstandard.compress(data)):
        path.write_bytes(packed)
        for make in (
            lambda: write_prepared(tmp_path / "out", [path], options, workers=1),
            lambda: prepare(section(path), cache=tmp_path / "cache"),
        ):
            with pytest.raises(DataError, match=rf"{message}.*--tokenizer bytes"):
                make()
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("inner", ["gz", "zst", "parquet"])
def test_what_is_packed_twice_is_refused(tmp_path: Path, inner: str) -> None:
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(table(["a"]) if inner == "parquet" else PACKED[inner](TEXT)))
    with (
        pytest.raises(DataError, match=r"found (gzip|Zstandard|Parquet) in gzip.*Decompress it once"),
        open_text(Span(path)),
    ):
        pass


def test_bytes_of_any_file_train_where_they_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = BINARY["PNG"][0]
    (tmp_path / "in").write_bytes(data)
    (tmp_path / "in.gz").write_bytes(gzip.compress(data))
    for name in ("in", "in.gz"):
        command = [str(tmp_path / name), "--output", str(tmp_path / f"out-{name}")]
        assert main(command) == 2
        assert "write out the tokenizer: --tokenizer bytes" in capsys.readouterr().err
        assert main([*command, "--tokenizer", "bytes"]) == 0
        tokens = open_token_file(tmp_path / f"out-{name}/train_000000.bin").read().tolist()
        assert tokens == [*data, 256]  # what is in a compressed file is the text even so
        named = prepare(section(tmp_path / name, tokenizer="bytes"), cache=tmp_path / "cache")
        with pytest.raises(DataError, match=r"found PNG"):  # though the cache holds its bytes
            prepare(section(tmp_path / name), cache=tmp_path / "cache")
        assert named.vocab_size == 257


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
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    (tmp_path / "in.txt").write_bytes(DAMAGED[case])
    assert main([str(tmp_path / "in.txt"), "--output", str(tmp_path / "out"), "--tokenizer", "bytes"]) == 2
    assert "in.txt" in (error := capsys.readouterr().err)
    assert "damaged or cut off" in error
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


@pytest.mark.parametrize(("package", "extra"), [("zstandard", "zstd"), ("pyarrow", "parquet")])
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, extra: str
) -> None:
    (tmp_path / "in").write_bytes(zstd(TEXT) if extra == "zstd" else table(["a"]))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=rf"in\), expected {package}.*pip install 'torch-reprise\[{extra}\]'"):
        prepare(section(tmp_path / "in"), cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["a", None], "row 2.*null"),
        ([1, 2], "column 'text' with strings.*values of type int64"),
        ([b"a", b"b"], "values of type binary"),
    ],
)
def test_a_row_without_a_text_is_refused(tmp_path: Path, texts: list[str], problem: str) -> None:
    (tmp_path / "in").write_bytes(table(texts))
    with pytest.raises(DataError, match=problem):
        write_prepared(tmp_path / "out", [tmp_path / "in"], PrepareOptions(TextForm.jsonl), workers=1)


def test_a_table_is_not_one_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_bytes(table(["a"], use_dictionary=False))
    command = [str(tmp_path / "in.txt"), "--output", str(tmp_path / "out")]
    assert main([*command, "--form", "text"]) == 2
    assert "A Parquet file has documents" in capsys.readouterr().err
    assert main(command) == 0


def test_a_line_and_a_text_have_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "b"}\n{"text": "' + b"a" * 3_000_000 + b'"}\n'))
    assert sum(len(block.data) for block in read_blocks(Span(path), TextForm.jsonl, LINES)) == 3_000_027
    monkeypatch.setattr(blocks, "MOST_BLOCK_BYTES", 1 << 20)
    with pytest.raises(DataError, match=r"line is too long.*line 2.*at most 1048576"):
        list(read_blocks(Span(path), TextForm.jsonl, LINES))
    monkeypatch.setattr(text_file, "MOST_TEXT_BYTES", 1 << 20)
    with pytest.raises(DataError, match=r"too large to be held in memory.*prepare-data"):
        prepare(section(path), cache=tmp_path / "cache")


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_bomb_takes_the_memory_of_a_few_blocks(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    (tmp_path / "in").write_bytes(pack(b"bomb-" * (32 << 20)))
    tracemalloc.start()
    try:
        with open_text(Span(tmp_path / "in")) as reader:
            size = sum(len(reader.read(1 << 18)) for _ in iter(reader.has_more, False))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size == 5 * (32 << 20)
    assert peak < 64 << 20
