"""Text to token files: the same bytes wherever they are made, kept in a cache, split without overlap."""

from __future__ import annotations

import errno
import multiprocessing
import os
import sysconfig
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.errors import DataError
from trainer.data.corpus import Corpus, default_cache, prepare
from trainer.data.section import DataKind, DataSection, SampleCut, problems
from trainer.data.text import TextSource, find_files, split_documents, stdlib_sources
from trainer.data.token_file import open_token_file, write_token_file


def text_section(path: object, **keys: object) -> DataSection:
    return replace(DataSection(kind=DataKind.text, path=str(path)), **keys)


def tokens_of(paths: tuple[Path, ...]) -> list[int]:
    return [token for path in paths for token in open_token_file(path).read().tolist()]


def contents(corpus: Corpus) -> list[bytes]:
    return [path.read_bytes() for path in corpus.train + corpus.valid]


def write_texts(folder: Path, count: int) -> dict[str, bytes]:
    texts = {f"{number:03}.txt": f"text {number}\n".encode() * (number + 1) for number in range(count)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_bytes(text)
    return texts


def split_at_end_of_text(tokens: list[int]) -> list[bytes]:
    documents, current = [], bytearray()
    for token in tokens:
        if token == 256:
            documents.append(bytes(current))
            current.clear()
        else:
            current.append(token)
    assert not current
    return documents


# A single file


def test_a_single_file_gives_its_end_to_valid(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    section = text_section(tmp_path / "a.txt", tokenizer="bytes", valid_fraction=0.1)
    corpus = prepare(section, cache=tmp_path / "cache")
    assert tokens_of(corpus.train) == [*range(90), 256]
    assert tokens_of(corpus.valid) == [*range(90, 100), 256]
    assert (corpus.vocab_size, corpus.end_of_text) == (257, 256)
    assert open_token_file(corpus.train[0]).dtype == np.uint16


@given(text=st.text(min_size=1, max_size=60), valid_fraction=st.floats(0.01, 0.99))
def test_a_single_file_is_cut_between_characters(
    tmp_path_factory: pytest.TempPathFactory, text: str, valid_fraction: float
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    raw = text.encode("utf-8")
    path.write_bytes(raw)
    source = TextSource(path=path, name="a.txt", size_bytes=len(raw), mtime_ns=path.stat().st_mtime_ns)
    sides = split_documents([source], valid_fraction, takes_bytes=True)  # a text may have NUL
    train, valid = ([document.text for document in part] for part in sides)
    assert train[0].decode() + valid[0].decode() == text


# Several files


def test_files_are_split_whole_and_in_the_order_of_their_names(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", 60)
    corpus = prepare(text_section(tmp_path / "texts" / "*.txt", valid_fraction=0.2), cache=tmp_path / "cache")
    train, valid = (split_at_end_of_text(tokens_of(part)) for part in (corpus.train, corpus.valid))
    assert sorted(train + valid) == sorted(texts.values())
    assert 3 <= len(valid) <= 24
    for part in (train, valid):
        assert part == sorted(part, key=list(texts.values()).index)


def test_a_file_keeps_its_side_when_others_come(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", 40)
    section = text_section(tmp_path / "texts" / "**" / "*.txt", valid_fraction=0.3)
    before = prepare(section, cache=tmp_path / "cache")
    before_valid = split_at_end_of_text(tokens_of(before.valid))
    (tmp_path / "texts" / "deeper").mkdir()
    (tmp_path / "texts" / "deeper" / "new.txt").write_bytes(b"new")
    after_valid = split_at_end_of_text(tokens_of(prepare(section, cache=tmp_path / "cache").valid))
    assert [text for text in after_valid if text != b"new"] == before_valid


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("valid_fraction", [1e-9, 0.05, 0.5, 1 - 1e-9])
def test_neither_side_of_several_files_is_empty(tmp_path: Path, count: int, valid_fraction: float) -> None:
    write_texts(tmp_path / "texts", count)
    section = text_section(tmp_path / "texts" / "*", valid_fraction=valid_fraction)
    corpus = prepare(section, cache=tmp_path / "cache")
    sizes = [len(split_at_end_of_text(tokens_of(part))) for part in (corpus.train, corpus.valid)]
    assert min(sizes) >= 1
    assert sum(sizes) == count


def test_a_glob_without_files_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing-\*\.txt"):
        prepare(text_section(tmp_path / "nothing-*.txt"), cache=tmp_path / "cache")
    with pytest.raises(DataError, match="found a folder, pipe or device"):
        prepare(text_section(Path("/dev/null")), cache=tmp_path / "cache")
    with pytest.raises(DataError, match="found a folder"):
        prepare(text_section(tmp_path), cache=tmp_path / "cache")


@pytest.mark.parametrize("kind", ["dead link", "link to itself", "pipe"])
def test_a_match_that_gives_nothing_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    write_texts(tmp_path, 3)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("000.txt")
    assert len(find_files(f"{tmp_path}/*")) == 4
    match kind:
        case "dead link":
            (tmp_path / "odd").symlink_to("gone")
        case "link to itself":
            (tmp_path / "odd").symlink_to("odd")
        case _:
            os.mkfifo(tmp_path / "odd")
    with pytest.raises(DataError, match=r"a match is no file \(.*/odd\)"):
        find_files(f"{tmp_path}/*")
    with pytest.raises(DataError, match=r"no file matches \(.*/odd\)"):
        find_files(f"{tmp_path}/odd")


def test_a_name_with_glob_characters_names_itself(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_bytes(b"x" * 100)
    corpus = prepare(text_section(tmp_path / "a[1].txt"), cache=tmp_path / "cache")
    assert tokens_of(corpus.train) == [*(b"x" * 95), 256]


# The cache


def test_token_files_are_equal_when_made_elsewhere(tmp_path: Path) -> None:
    made = []
    for place in ("one", "two/deeper"):
        write_texts(tmp_path / place, 30)
        for path in (tmp_path / place).iterdir():
            os.utime(path, ns=(len(place), len(place)))
        made.append(prepare(text_section(tmp_path / place / "*.txt"), cache=tmp_path / place / "cache"))
    assert contents(made[0]) == contents(made[1])


def test_a_prepared_corpus_is_used_again(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", 5)
    section = text_section(tmp_path / "texts" / "*.txt")
    first = prepare(section, cache=tmp_path / "cache")
    made = [path.stat().st_ino for path in first.train + first.valid]
    assert prepare(section, cache=tmp_path / "cache") == first
    assert [path.stat().st_ino for path in first.train + first.valid] == made


def test_a_changed_text_or_split_is_prepared_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * 1000)
    os.utime(path, ns=(1, 1))
    first = prepare(text_section(path), cache=tmp_path / "cache")
    path.write_bytes(b"b" * 1000)
    os.utime(path, ns=(2, 2))
    second = prepare(text_section(path), cache=tmp_path / "cache")
    third = prepare(text_section(path, valid_fraction=0.5), cache=tmp_path / "cache")
    assert [tokens_of(corpus.train)[0] for corpus in (first, second)] == [ord("a"), ord("b")]
    assert len(tokens_of(third.train)) == 501


def test_a_damaged_cache_file_is_written_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 1000)
    corpus = prepare(text_section(tmp_path / "a.txt"), cache=tmp_path / "cache")
    before = contents(corpus)
    corpus.train[0].write_bytes(before[0][:-1])
    corpus.valid[0].unlink()
    assert contents(prepare(text_section(tmp_path / "a.txt"), cache=tmp_path / "cache")) == before


def test_processes_that_prepare_at_once_get_the_same_files(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", 200)
    section = text_section(tmp_path / "texts" / "*.txt")
    alone = contents(prepare(section, cache=tmp_path / "alone"))
    context = multiprocessing.get_context("spawn")
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
        with pytest.raises(DataError, match=r"a\.txt.*changed|changed.*a\.txt"):
            split_documents([source], 0.5)


def test_a_cache_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 1000)
    with pytest.raises(DataError, match=r"data\.cache"):
        prepare(text_section(tmp_path / "a.txt"), cache=tmp_path / "a.txt" / "cache")


@pytest.mark.parametrize(
    ("environment", "folder"),
    [({}, "/home/me/.cache"), ({"XDG_CACHE_HOME": "/fast"}, "/fast"), ({"XDG_CACHE_HOME": "here"}, "/home/me/.cache")],
)
def test_the_default_cache_follows_the_xdg_rules(environment: dict[str, str], folder: str) -> None:
    assert default_cache(environment, Path("/home/me")) == Path(folder, "reprise")


# The standard library


def test_stdlib_gives_the_same_bytes_twice(tmp_path: Path) -> None:
    first = prepare(DataSection(), cache=tmp_path / "a")
    second = prepare(DataSection(), cache=tmp_path / "b")
    assert contents(first) == contents(second)
    train, valid = (open_token_file(part[0]).read() for part in (first.train, first.valid))
    assert train.max() == valid.max() == 256
    assert train.size > 5_000_000
    assert 100_000 < valid.size < 0.3 * train.size


def test_stdlib_holds_every_source_file_once() -> None:
    sources = stdlib_sources(Path(sysconfig.get_paths()["stdlib"]))
    names = [source.name for source in sources]
    assert names == sorted(set(names))
    assert {"argparse.py", "json/decoder.py"} <= set(names)


def test_stdlib_leaves_out_packages_and_tests(tmp_path: Path) -> None:
    kept = ["a.py", "json/b.py", "testing.py"]
    left = ["site-packages/c.py", "dist-packages/d.py", "test/e.py", "json/tests/f.py", "idlelib/g.py", "lib2to3/h.py"]
    left += ["__pycache__/i.py", "_sysconfigdata__linux.py", "json/j.txt", "sitecustomize.py"]
    for name in kept + left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [source.name for source in stdlib_sources(tmp_path)] == kept


def test_a_stdlib_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\.py"):
        stdlib_sources(tmp_path)


# Tokenizers


def write_tokenizer(path: Path, *, special: list[str], fill: int = 0) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(alphabet + [f"fill{n}" for n in range(fill)])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("name", ["<|endoftext|>", "</s>", "<|end_of_text|>"])
def test_a_tokenizer_ends_texts_with_its_own_token(tmp_path: Path, name: str) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", special=[name])
    (tmp_path / "a.txt").write_text("aé" * 100)
    corpus = prepare(text_section(tmp_path / "a.txt", tokenizer=str(tokenizer)), cache=tmp_path / "cache")
    assert (corpus.vocab_size, corpus.end_of_text) == (257, 256)
    train, valid = tokens_of(corpus.train), tokens_of(corpus.valid)
    assert train[-1] == valid[-1] == 256
    assert len(train) + len(valid) == 300 + 2


def test_a_text_that_spells_the_end_of_text_does_not_end(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", special=["<|endoftext|>"])
    (tmp_path / "a.txt").write_text("see <|endoftext|> there " * 10)
    corpus = prepare(text_section(tmp_path / "a.txt", tokenizer=str(tokenizer)), cache=tmp_path / "cache")
    assert tokens_of(corpus.train).count(256) == 1


def test_a_vocabulary_above_65536_is_written_as_uint32(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", special=["</s>"], fill=2**16)
    (tmp_path / "a.txt").write_text("abc" * 10)
    corpus = prepare(text_section(tmp_path / "a.txt", tokenizer=str(tokenizer)), cache=tmp_path / "cache")
    assert open_token_file(corpus.train[0]).dtype == np.uint32
    assert tokens_of(corpus.valid)[-1] == corpus.end_of_text == 2**16 + 256


def test_a_tokenizer_without_end_of_text_is_refused_by_name(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", special=["<end>"])
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(DataError, match=r"<\|endoftext\|>, </s>, <\|end_of_text\|>"):
        prepare(text_section(tmp_path / "a.txt", tokenizer=str(tokenizer)), cache=tmp_path / "cache")


def test_a_text_not_in_utf_8_is_refused_unless_bytes_are_named(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", special=["</s>"])
    (tmp_path / "a.txt").write_bytes(b"fine" * 10)
    (tmp_path / "b.txt").write_bytes(b"abc\xff" * 10)
    with pytest.raises(DataError, match=r"b\.txt, byte 3.*0xff"):
        prepare(text_section(tmp_path / "[ab].txt", tokenizer=str(tokenizer)), cache=tmp_path / "cache")
    by_bytes = text_section(tmp_path / "[ab].txt", tokenizer="bytes")
    assert prepare(by_bytes, cache=tmp_path / "cache").vocab_size == 257
    with pytest.raises(DataError, match=r"b\.txt, byte 3"):  # the bytes of the cache were asked for by name
        prepare(text_section(tmp_path / "[ab].txt"), cache=tmp_path / "cache")


def test_a_tokenizer_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "t.json").write_text("{}")
    for name in ("t.json", "missing.json"):
        with pytest.raises(DataError, match=name):
            prepare(text_section(tmp_path / "a.txt", tokenizer=str(tmp_path / name)), cache=tmp_path / "cache")


# The section


def test_token_files_are_sorted_and_their_vocabulary_unknown(tmp_path: Path) -> None:
    for name in ("b.bin", "a.bin", "v.bin"):
        write_token_file(tmp_path / name, [np.arange(3)], dtype=np.uint16)
    section = DataSection(kind=DataKind.token_file, train=f"{tmp_path}/[ab].bin", valid=f"{tmp_path}/v.bin")
    corpus = prepare(section, cache=tmp_path / "cache")
    assert [path.name for path in corpus.train] == ["a.bin", "b.bin"]
    assert [path.name for path in corpus.valid] == ["v.bin"]
    assert (corpus.vocab_size, corpus.end_of_text) == (None, None)
    assert prepare(replace(section, vocab_size=50257, valid=None), cache=tmp_path) == Corpus(
        train=corpus.train, valid=(), vocab_size=50257, end_of_text=None
    )


def test_a_larger_vocabulary_is_kept_and_a_smaller_one_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 100)
    assert prepare(text_section(tmp_path / "a.txt", vocab_size=320), cache=tmp_path / "cache").vocab_size == 320
    with pytest.raises(DataError, match=r"data\.vocab_size.*at least 257.*256"):
        prepare(text_section(tmp_path / "a.txt", vocab_size=256), cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        (DataSection(), []),
        (DataSection(kind=DataKind.text, path="x", tokenizer="y"), []),
        (DataSection(kind=DataKind.token_file, train="x"), []),
        (DataSection(path="x"), ["data.path"]),
        (DataSection(kind=DataKind.text), ["data.path"]),
        (DataSection(kind=DataKind.text, path="", train="x"), ["data.path", "data.train"]),
        (DataSection(kind=DataKind.token_file, tokenizer="x", valid="x"), ["data.train"]),
        (DataSection(kind=DataKind.stdlib, tokenizer="x", path="y", valid="z"), ["data.path", "data.valid"]),
        (DataSection(valid_fraction=0.0, vocab_size=0), ["data.valid_fraction", "data.vocab_size"]),
        (DataSection(valid_fraction=1.0), ["data.valid_fraction"]),
        (DataSection(valid_fraction=float("nan")), ["data.valid_fraction"]),
        (DataSection(kind=DataKind.token_file, train=[{"path": "a", "weight": 0.1}], valid=["b", "c"]), []),
        (DataSection(kind=DataKind.text, train=[{"path": "a", "weight": "1/3"}, {"path": "b", "weight": 2}]), []),
        (DataSection(kind=DataKind.text, path="x", train=[{"path": "a", "weight": 1}]), ["data.path"]),
        (DataSection(kind=DataKind.token_file, train=[]), ["data.train"]),
        (DataSection(kind=DataKind.token_file, train=5, valid=[]), ["data.train", "data.valid"]),
        (DataSection(kind=DataKind.token_file, train=["a"]), ["data.train[0]"]),
        (DataSection(kind=DataKind.token_file, train=[{"path": "a", "weight": 0}]), ["data.train[0].weight"]),
        (DataSection(kind=DataKind.token_file, train=[{"path": "s3://a", "weight": 1}]), ["data.train[0].path"]),
        (DataSection(kind=DataKind.megatron, train=[{"path": "a", "weight": 1}] * 2), ["data.train[1].path"]),
        (DataSection(train=[{"path": "a", "weight": 1}]), ["data.train"]),
        (DataSection(document_mask=True), []),
        (DataSection(kind=DataKind.megatron, train="a", document_mask=True), []),
        (
            DataSection(kind=DataKind.token_file, train="a", document_mask=True),
            ["data.document_mask: needs data.end_of_text, or data.tokenizer, whose end of text ends documents"],
        ),
        (DataSection(kind=DataKind.token_file, train="a", end_of_text=5), ["data.end_of_text"]),
        (DataSection(kind=DataKind.token_file, train="a", samples=SampleCut.per_document), ["data.samples"]),
    ],
)
def test_problems_name_the_keys_at_fault(section: DataSection, keys: list[str]) -> None:
    assert [problem.split("=")[0] for problem in problems(section)] == keys


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
    with pytest.raises(DataError, match=r"A folder cannot be listed \(.*a2/\), found the disk fails"):
        find_files(str(tmp_path / pattern))
    with pytest.raises(DataError, match=r"A folder cannot be listed \(.*a2\), found the disk fails"):
        stdlib_sources(tmp_path)
