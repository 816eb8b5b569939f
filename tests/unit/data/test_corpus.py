"""Text to tokens: the same at both doors, kept in a cache, split without overlap."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from reprise.errors import DataError
from tests.bpe import train_bpe
from tests.messages import refused
from tests.unit.data.doors import (
    corpus_of,
    of_texts,
    prepared,
    prose,
    sides,
    text_section,
    texts_of,
    tokens_of,
    trained,
)
from trainer.data.corpus import Corpus, default_cache, prepare
from trainer.data.section import DataKind, DataSection, SampleCut, problems
from trainer.data.token_file import open_token_file


def contents(corpus: Corpus) -> list[bytes]:
    return [path.read_bytes() for path in corpus.train + corpus.valid]


def write_texts(folder: Path, count: int) -> list[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    texts = [f"text {number}\n".encode() * (number + 1) for number in range(count)]
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_bytes(text)
    return texts


@pytest.mark.parametrize("fraction", [0.05, 0.5])
@pytest.mark.parametrize("pattern", ["one.txt", "one.txt.gz", "in.jsonl", "**/*.txt", "**/*.gz", "**/*"])
def test_both_doors_make_the_tokens_of_each_side(tmp_path: Path, pattern: str, fraction: float) -> None:
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    texts = [prose(900, seed=number) for number in range(9)]
    for number, text in enumerate(texts):
        name = "one" if number == 0 else f"deep/{number}" if number % 2 else f"{number}"
        (folder / f"{name}.txt").write_text(text, newline="")
        (folder / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": prose(9, seed)}) + "\n" for seed in range(150)))
    path = tmp_path / "tokenizer.json"
    path.write_bytes(train_bpe(texts, 300))
    command = [folder / pattern, "--valid-fraction", fraction]
    assert trained(tmp_path, folder / pattern, valid_fraction=fraction) == prepared(tmp_path / "out", *command)
    tokens = trained(tmp_path, folder / pattern, valid_fraction=fraction, tokenizer=str(path))
    assert tokens == prepared(tmp_path / "out", *command, "--tokenizer", path)
    assert tokens != trained(tmp_path, folder / pattern, valid_fraction=0.3, tokenizer=str(path))


@given(
    text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=60),
    fraction=st.floats(0.01, 0.99),
)
@example(text="🙂🙂", fraction=0.4)
def test_a_single_file_is_cut_between_characters(
    tmp_path_factory: pytest.TempPathFactory, text: str, fraction: float
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    path = folder / "a[1].txt"  # whose name is no glob
    path.write_bytes(text.encode())
    (train,), (valid,) = map(texts_of, sides(folder, path, valid_fraction=fraction))
    assert (train + valid).decode().removeprefix("\ufeff") == text.removeprefix("\ufeff")
    assert valid.decode() == text[len(text) - len(valid.decode()) :]
    assert abs(len(valid) - len(text.removeprefix("\ufeff").encode()) * fraction) <= 3.5


def test_files_are_split_whole_and_keep_their_sides(tmp_path: Path) -> None:
    texts, pattern = write_texts(tmp_path / "texts", 60), tmp_path / "texts" / "**" / "*.txt"
    train, valid = map(texts_of, sides(tmp_path, pattern, valid_fraction=0.2))
    assert sorted(train + valid) == sorted(texts)
    assert 3 <= len(valid) <= 24
    for part in (train, valid):
        assert part == sorted(part, key=texts.index)
    (tmp_path / "texts" / "deeper").mkdir()
    (tmp_path / "texts" / "deeper" / "new.txt").write_bytes(b"new")
    _, later = map(texts_of, sides(tmp_path, pattern, valid_fraction=0.2))
    assert [text for text in later if text != b"new"] == valid
    for fraction in (1e-9, 0.5, 1 - 1e-9):
        parts = sides(tmp_path, tmp_path / "texts/00[0-2].txt", valid_fraction=fraction)
        assert sorted(map(len, map(texts_of, parts))) == [1, 2]


def test_equal_documents_are_on_one_side_in_any_order(tmp_path: Path) -> None:
    texts, splits = [f"document {number % 50}" for number in range(200)], []
    for name, lines in (("one", texts), ("other", texts[::-1])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
        parts = [*map(texts_of, sides(tmp_path, tmp_path / f"{name}.jsonl", valid_fraction=0.3))]
        assert sum(map(len, parts)) == 200
        splits.append([*map(set, parts)])
    assert splits[0] == splits[1]
    assert all(splits[0])
    assert not splits[0][0] & splits[0][1]


# The cache


def test_a_corpus_is_used_again_until_something_changes(tmp_path: Path) -> None:
    corpora = []
    for place in ("one", "two/deeper"):
        write_texts(tmp_path / place, 30)
        for path in (tmp_path / place).iterdir():
            os.utime(path, ns=(len(place), len(place)))
        corpora.append(corpus_of(tmp_path, tmp_path / place / "*.txt"))
    corpus, inodes = corpora[0], [path.stat().st_ino for path in corpora[0].train + corpora[0].valid]
    before = contents(corpus)
    assert contents(corpora[1]) == before
    assert corpus_of(tmp_path, tmp_path / "one/*.txt") == corpus
    assert [path.stat().st_ino for path in corpus.train + corpus.valid] == inodes
    corpus.train[0].write_bytes(before[0][:-1])
    corpus.valid[0].unlink()
    assert contents(corpus_of(tmp_path, tmp_path / "one/*.txt")) == before
    path = tmp_path / "one/000.txt"
    for time, fraction in ((5, 0.5), (6, 0.5), (6, 0.25)):  # another time, then another share
        path.write_bytes(b"%d" % time * 100)
        os.utime(path, ns=(time, time))
        share = round(100 * fraction)
        assert sides(tmp_path, path, valid_fraction=fraction) == [
            of_texts(f"{time}" * (100 - share)),
            of_texts(f"{time}" * share),
        ]


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


def test_the_default_cache_follows_the_xdg_rules() -> None:
    home = Path("/home/me")
    assert default_cache({"XDG_CACHE_HOME": "/fast"}, home) == Path("/fast/reprise")
    assert default_cache({}, home) == default_cache({"XDG_CACHE_HOME": "here"}, home) == home / ".cache/reprise"


# The section


def test_a_vocabulary_above_65536_is_written_as_uint32(tmp_path: Path) -> None:
    vocabulary = {"<|endoftext|>": 0, "abc": 2**16}
    tokenizer = Tokenizer(WordLevel(vocabulary, "abc"))
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
    Tokenizer(WordLevel({"<end>": 0}, "<end>")).save(str(tmp_path / "u.json"))
    for name, word in (("t.json", "t.json"), ("missing.json", "missing.json"), ("u.json", "<|endoftext|>, </s>")):
        with refused(DataError, word):
            trained(tmp_path, path, tokenizer=f"{tmp_path}/{name}")
    with refused(DataError, "data.cache"):
        prepare(text_section(path), cache=path / "cache")


# A data section, and the keys at fault.
SECTIONS = {
    "": "",
    "path: x": "data.path",
    "kind: text": "data.path",
    "kind: token_file, tokenizer: x, valid: x": "data.train",
    "tokenizer: x, path: y, valid: z": "data.path data.valid",
    "kind: token_file, train: [{path: a, weight: 0.1}], valid: [b, c]": "",
    "kind: text, train: [{path: a, weight: 1/3}, {path: b, weight: 2}]": "",
    "kind: token_file, train: []": "data.train",
    "kind: token_file, train: 5, valid: []": "data.train data.valid",
    "kind: token_file, train: [a]": "data.train[0]",
    "kind: token_file, train: [{path: a, weight: 0}]": "data.train[0].weight",
    "kind: token_file, train: [{path: 's3://a', weight: 1}]": "data.train[0].path",
    "train: [{path: a, weight: 1}]": "data.train",
    "kind: megatron, train: a, document_mask: true": "",
    "kind: token_file, train: a, document_mask: true": "data.document_mask",
    "kind: token_file, train: a, end_of_text: 5": "data.end_of_text",
    "kind: token_file, train: a, samples: per_document": "data.samples",
}


@pytest.mark.parametrize("text", SECTIONS)
def test_problems_name_the_keys_at_fault(text: str) -> None:
    values = yaml.safe_load(f"{{{text}}}")
    for key, kind in (("kind", DataKind), ("samples", SampleCut)):
        if key in values:
            values[key] = kind(values[key])
    found = problems(DataSection(**values))
    assert " ".join(re.split("[=:]", problem)[0] for problem in found) == SECTIONS[text]
