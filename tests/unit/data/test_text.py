"""Text to token files: the same bytes wherever they are made, kept in a cache, split without overlap."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import sysconfig
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from reprise.errors import DataError
from tests.messages import refused
from tests.unit.data.doors import corpus_of, text_section, tokens_of, trained
from trainer.data.blocks import SplitOptions, read_blocks, split
from trainer.data.corpus import Corpus, default_cache, prepare
from trainer.data.cuts import CHARACTERS
from trainer.data.section import DataKind, DataSection, SampleCut, problems
from trainer.data.sources import TextSource, find_files, stdlib_sources
from trainer.data.token_file import open_token_file, write_token_file


def contents(corpus: Corpus) -> list[bytes]:
    return [path.read_bytes() for path in corpus.train + corpus.valid]


def write_texts(folder: Path, count: int) -> list[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    texts = [f"text {number}\n".encode() * (number + 1) for number in range(count)]
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_bytes(text)
    return texts


def sides_of(corpus: Corpus) -> list[list[bytes]]:
    """Return the texts of both sides of a corpus of bytes."""
    sides = ["".join(map(chr, tokens_of(paths))) for paths in (corpus.train, corpus.valid)]
    assert all(side.endswith(chr(256)) for side in sides)
    return [[text.encode("latin-1") for text in side[:-1].split(chr(256))] for side in sides]


def test_a_single_file_gives_its_end_to_valid(tmp_path: Path) -> None:
    path = tmp_path / "a[1].txt"  # whose name is no glob
    path.write_bytes(bytes(range(100)))
    corpus = corpus_of(tmp_path, path, tokenizer="bytes", valid_fraction=0.1)
    assert sides_of(corpus) == [[bytes(range(90))], [bytes(range(90, 100))]]
    assert (corpus.vocab_size, corpus.end_of_text) == (257, 256)
    assert open_token_file(corpus.train[0]).dtype == np.uint16


@given(text=st.text(min_size=1, max_size=60), valid_fraction=st.floats(0.01, 0.99))
def test_a_single_file_is_cut_between_characters(
    tmp_path_factory: pytest.TempPathFactory, text: str, valid_fraction: float
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.txt"
    raw = text.encode("utf-8")
    path.write_bytes(raw)
    source = TextSource(path=path, name="a.txt", size_bytes=len(raw), mtime_ns=path.stat().st_mtime_ns)
    # A text may have NUL.
    sides = split([source], SplitOptions(takes_bytes=True, valid_fraction=valid_fraction, block_bytes=7)).values()
    parts = [b"".join(block.data for part in side for block in read_blocks(part, CHARACTERS)) for side in sides]
    assert [part.decode() for part in parts] == [text[: len(parts[0].decode())], text[len(parts[0].decode()) :]]
    assert abs(len(parts[1]) - len(raw) * valid_fraction) <= 4


def test_files_are_split_whole_and_keep_their_sides(tmp_path: Path) -> None:
    texts, pattern = write_texts(tmp_path / "texts", 60), tmp_path / "texts" / "**" / "*.txt"
    train, valid = sides_of(corpus_of(tmp_path, pattern, valid_fraction=0.2))
    assert sorted(train + valid) == sorted(texts)
    assert 3 <= len(valid) <= 24
    for part in (train, valid):
        assert part == sorted(part, key=texts.index)
    (tmp_path / "texts" / "deeper").mkdir()
    (tmp_path / "texts" / "deeper" / "new.txt").write_bytes(b"new")
    _, later = sides_of(corpus_of(tmp_path, pattern, valid_fraction=0.2))
    assert [text for text in later if text != b"new"] == valid


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("valid_fraction", [1e-9, 0.05, 0.5, 1 - 1e-9])
def test_neither_side_of_several_files_is_empty(tmp_path: Path, count: int, valid_fraction: float) -> None:
    write_texts(tmp_path / "texts", count)
    sizes = [len(side) for side in sides_of(corpus_of(tmp_path, f"{tmp_path}/texts/*", valid_fraction=valid_fraction))]
    assert min(sizes) >= 1
    assert sum(sizes) == count


def test_a_match_that_gives_nothing_is_refused_by_name(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    write_texts(texts, 3)
    (texts / "folder").mkdir()
    (texts / "link").symlink_to("000.txt")
    assert len(find_files(f"{texts}/*")) == 4
    for pattern in (f"{texts}/nothing-*.txt", "/dev/null", str(texts)):
        with refused(DataError, pattern):
            find_files(pattern)
    odd = texts / "odd"
    for make in (lambda: odd.symlink_to("gone"), lambda: odd.symlink_to("odd"), lambda: os.mkfifo(odd)):
        make()
        for pattern in (f"{texts}/*", f"{texts}/odd"):
            with refused(DataError, f"{odd}"):
                find_files(pattern)
        odd.unlink()


@pytest.mark.parametrize("pattern", ["*/*.txt", "**/*.txt", "a?/[0-9]*.txt"])
def test_a_folder_that_cannot_be_listed_is_no_smaller_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    for name in ("a1", "a2"):
        write_texts(tmp_path / name, 3)
    listed = os.scandir
    assert len(find_files(str(tmp_path / pattern))) == 6

    def scandir(path: str) -> object:
        if str(path).rstrip("/").endswith("a2"):
            raise OSError(errno.EIO, "the disk fails", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    for find in (lambda: find_files(str(tmp_path / pattern)), lambda: stdlib_sources(tmp_path)):
        with refused(DataError, "a2", "the disk fails"):
            find()


# The cache


def test_a_corpus_is_used_again_until_something_changes(tmp_path: Path) -> None:
    made = []
    for place in ("one", "two/deeper"):
        write_texts(tmp_path / place, 30)
        for path in (tmp_path / place).iterdir():
            os.utime(path, ns=(len(place), len(place)))
        made.append(corpus_of(tmp_path, tmp_path / place / "*.txt"))
    corpus, inodes = made[0], [path.stat().st_ino for path in made[0].train + made[0].valid]
    before = contents(corpus)
    assert contents(made[1]) == before
    assert corpus_of(tmp_path, tmp_path / "one/*.txt") == corpus
    assert [path.stat().st_ino for path in corpus.train + corpus.valid] == inodes
    corpus.train[0].write_bytes(before[0][:-1])
    corpus.valid[0].unlink()
    assert contents(corpus_of(tmp_path, tmp_path / "one/*.txt")) == before


def test_a_changed_text_or_split_is_prepared_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for letter, time in ((b"a", 1), (b"b", 2)):
        path.write_bytes(letter * 1000)
        os.utime(path, ns=(time, time))
        assert sides_of(corpus_of(tmp_path, path)) == [[letter * 950], [letter * 50]]
    assert sides_of(corpus_of(tmp_path, path, valid_fraction=0.5)) == [[b"b" * 500]] * 2


def test_processes_that_prepare_at_once_get_the_same_files(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", 200)
    section = text_section(tmp_path / "texts" / "*.txt")
    alone = contents(prepare(section, cache=tmp_path / "alone"))
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=prepare, args=(section,), kwargs={"cache": tmp_path / "cache"}) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert contents(prepare(section, cache=tmp_path / "cache")) == alone
    assert {path.name for path in (tmp_path / "cache").rglob("*.*")} == {"train.bin", "valid.bin"}


def test_a_text_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc")
    for size_bytes, mtime_ns in ((4, path.stat().st_mtime_ns), (3, 1)):
        source = TextSource(path=path, name="a.txt", size_bytes=size_bytes, mtime_ns=mtime_ns)
        with pytest.raises(DataError, match=r"a\.txt"):
            list(read_blocks(*split([source], SplitOptions())["train"], CHARACTERS))


@pytest.mark.parametrize(
    ("environment", "folder"),
    [({}, "/home/me/.cache"), ({"XDG_CACHE_HOME": "/fast"}, "/fast"), ({"XDG_CACHE_HOME": "here"}, "/home/me/.cache")],
)
def test_the_default_cache_follows_the_xdg_rules(environment: dict[str, str], folder: str) -> None:
    assert default_cache(environment, Path("/home/me")) == Path(folder, "reprise")


# The standard library


def test_stdlib_gives_the_same_bytes_twice(tmp_path: Path) -> None:
    first, second = (prepare(DataSection(), cache=tmp_path / name) for name in "ab")
    assert contents(first) == contents(second)
    train, valid = (open_token_file(part[0]).read() for part in (first.train, first.valid))
    assert train.max() == valid.max() == 256
    assert train.size > 5_000_000
    assert 100_000 < valid.size < 0.3 * train.size


def test_stdlib_leaves_out_packages_and_tests(tmp_path: Path) -> None:
    names = [source.name for source in stdlib_sources(Path(sysconfig.get_paths()["stdlib"]))]
    assert names == sorted(set(names))
    with refused(DataError, "*.py"):
        stdlib_sources(tmp_path)
    kept = ["a.py", "json/b.py", "testing.py"]
    left = ["site-packages/c.py", "dist-packages/d.py", "test/e.py", "json/tests/f.py", "idlelib/g.py", "lib2to3/h.py"]
    left += ["__pycache__/i.py", "_sysconfigdata__linux.py", "json/j.txt", "sitecustomize.py"]
    for name in kept + left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [source.name for source in stdlib_sources(tmp_path)] == kept


# The section


def test_a_vocabulary_above_65536_is_written_as_uint32(tmp_path: Path) -> None:
    vocabulary = {"<|endoftext|>": 0, "abc": 2**16}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "abc"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("abc " * 10)
    corpus = corpus_of(tmp_path, tmp_path / "a.txt", tokenizer=f"{tmp_path}/tokenizer.json", valid_fraction=0.5)
    assert open_token_file(corpus.train[0]).dtype == np.uint32
    assert tokens_of(corpus.valid) == [2**16] * 5 + [0]


def test_sections_that_no_corpus_serves_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abc" * 100)
    (tmp_path / "t.json").write_text("{}")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"<end>": 0}, "<end>")).save(str(tmp_path / "u.json"))
    for name, word in (("t.json", "t.json"), ("missing.json", "missing.json"), ("u.json", "<|endoftext|>, </s>")):
        with refused(DataError, word):
            trained(tmp_path, path, tokenizer=f"{tmp_path}/{name}")
    with refused(DataError, "data.vocab_size", "257", "256"):
        trained(tmp_path, path, vocab_size=256)
    assert corpus_of(tmp_path, path, vocab_size=320).vocab_size == 320
    with refused(DataError, "data.cache"):
        prepare(text_section(path), cache=path / "cache")


def test_token_files_are_sorted_and_their_vocabulary_unknown(tmp_path: Path) -> None:
    for name in ("b.bin", "a.bin", "v.bin"):
        write_token_file(tmp_path / name, [np.arange(3)], dtype=np.uint16)
    section = DataSection(kind=DataKind.token_file, train=f"{tmp_path}/[ab].bin", valid=f"{tmp_path}/v.bin")
    train, valid = (tmp_path / "a.bin", tmp_path / "b.bin"), (tmp_path / "v.bin",)
    assert prepare(section, cache=tmp_path) == Corpus(train, valid, None, None)
    known = replace(section, vocab_size=50257, valid=None)
    assert prepare(known, cache=tmp_path) == Corpus(train, (), 50257, None)


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        (DataSection(), []),
        (DataSection(path="x", valid_fraction=1.0), ["data.path", "data.valid_fraction"]),
        (DataSection(kind=DataKind.text, valid_fraction=float("nan")), ["data.path", "data.valid_fraction"]),
        (DataSection(kind=DataKind.token_file, tokenizer="x", valid="x"), ["data.train"]),
        (DataSection(kind=DataKind.stdlib, tokenizer="x", path="y", valid="z"), ["data.path", "data.valid"]),
        (DataSection(valid_fraction=0.0, vocab_size=0), ["data.valid_fraction", "data.vocab_size"]),
        (DataSection(kind=DataKind.token_file, train=[{"path": "a", "weight": 0.1}], valid=["b", "c"]), []),
        (DataSection(kind=DataKind.text, train=[{"path": "a", "weight": "1/3"}, {"path": "b", "weight": 2}]), []),
        (DataSection(kind=DataKind.token_file, train=[]), ["data.train"]),
        (DataSection(kind=DataKind.token_file, train=5, valid=[]), ["data.train", "data.valid"]),
        (DataSection(kind=DataKind.token_file, train=["a"]), ["data.train[0]"]),
        (DataSection(kind=DataKind.token_file, train=[{"path": "a", "weight": 0}]), ["data.train[0].weight"]),
        (DataSection(kind=DataKind.token_file, train=[{"path": "s3://a", "weight": 1}]), ["data.train[0].path"]),
        (DataSection(kind=DataKind.megatron, train=[{"path": "a", "weight": 1}] * 2), ["data.train[1].path"]),
        (DataSection(train=[{"path": "a", "weight": 1}]), ["data.train"]),
        (DataSection(kind=DataKind.megatron, train="a", document_mask=True), []),
        (DataSection(kind=DataKind.token_file, train="a", document_mask=True), ["data.document_mask"]),
        (DataSection(kind=DataKind.token_file, train="a", end_of_text=5), ["data.end_of_text"]),
        (DataSection(kind=DataKind.token_file, train="a", samples=SampleCut.per_document), ["data.samples"]),
    ],
)
def test_problems_name_the_keys_at_fault(section: DataSection, keys: list[str]) -> None:
    assert [re.split("[=:]", problem)[0] for problem in problems(section)] == keys
