"""Token files made once from large files: every text comes back, whoever did the work, and nothing appears half."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shlex
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.bpe import train_bpe
from tests.harness import compose
from tests.messages import Printed
from tests.profiles import examples
from tests.unit.data.doors import WORDS, content, prepared, prose, refusal, tokens_of
from trainer.commands.prepare_data import main
from trainer.data import corpus, text_file
from trainer.data.blocks import TextForm
from trainer.data.encoding import Encoded, in_order
from trainer.data.indexed_file import open_indexed_file
from trainer.data.prepared import PrepareOptions, write_prepared
from trainer.data.sources import find_files, text_sources
from trainer.data.text import open_encoder
from trainer.data.token_file import open_token_file


def lines(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(texts))


@pytest.mark.parametrize("form", [TextForm.text, pytest.param(TextForm.jsonl, marks=pytest.mark.slow)])
def test_the_files_do_not_depend_on_the_number_of_processes(tmp_path: Path, form: TextForm) -> None:
    paths = [tmp_path / f"{number}.{form.value}" for number in range(4)]
    for number, path in enumerate(paths):
        texts = [prose(40, seed=100 * number + part) for part in range(20)]
        path.write_text(lines(texts) if form is TextForm.jsonl else "".join(texts), newline="")
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(small_tokenizer())
    wanted = PrepareOptions(form, tokenizer=tokenizer, valid_fraction=0.4, file_tokens=2000)
    for workers in (1, 3):
        with mock.patch.object(text_file, "BLOCK_BYTES", 500):
            sources = text_sources(f"{tmp_path}/*.{form.value}")
            write_prepared(tmp_path / f"by{workers}", sources, wanted, workers=workers)
    found = content(tmp_path / "by1")
    assert found == content(tmp_path / "by3")
    assert {"train_000000.bin", "train_000001.bin", "valid_000000.bin"} <= set(found)
    assert open_token_file(tmp_path / "by1/train_000000.bin").count == 2000
    assert not list(tmp_path.glob(".*"))


@cache
def small_tokenizer() -> bytes:
    return train_bpe([prose(60)], 320)


# A file with NUL is not text.
CHARACTERS = st.characters(exclude_categories=("Cs",), exclude_characters="\0")
TEXTS = st.lists(st.text(CHARACTERS) | st.sampled_from(WORDS), min_size=1, max_size=6)


@examples(30)
@given(texts=TEXTS, block_bytes=st.integers(1, 40))
@example(texts=["<|endoftext|>", "a<|endoftext|>\n"], block_bytes=3)
def test_every_text_has_the_tokens_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], block_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    path = folder / "tokenizer.json"
    path.write_bytes(small_tokenizer())
    (folder / "lines.jsonl").write_text(lines(texts))
    (folder / "text.txt").write_bytes("".join(texts).removeprefix("\ufeff").encode())
    for name, documents in (("lines.jsonl", texts), ("text.txt", ["".join(texts).removeprefix("\ufeff")])):
        for tokenizer in (None, path):
            options = PrepareOptions(TextForm.text if name == "text.txt" else None, tokenizer=tokenizer)
            sources = text_sources(f"{folder}/{name}")
            with mock.patch.object(text_file, "BLOCK_BYTES", block_bytes):
                made = write_prepared(folder / "out", sources, options, workers=1)
            encoder = open_encoder(tokenizer)
            expected = [token for text in documents for token in [*encoder.encode(text), encoder.end_of_text]]
            assert tokens_of([folder / "out/train_000000.bin"]) == expected
            assert made.sides[0].documents == len(documents)
            shutil.rmtree(folder / "out")


def test_only_so_many_blocks_are_in_memory() -> None:
    started = taken = 0

    def start() -> Future[Encoded]:
        nonlocal started
        started += 1
        assert started - taken <= 4
        future: Future[Encoded] = Future()
        future.set_result(Encoded(np.empty(0, np.uint16), 1, 1))
        return future

    for _ in in_order((start() for _ in range(50)), most=4):
        taken += 1
    assert started == taken == 50


BAD_LINES = {
    "not JSON": '{"text": "a"',
    "no object": '["a"]',
    "no text": '{"body": "a"}',
    "a number": '{"text": 3}',
    "half a surrogate": '{"text": "\\ud800"}',
    "too deep": '{"text": ' + "[" * 100_000,
}


@pytest.mark.parametrize(("case", "workers"), [*((case, 1) for case in BAD_LINES), ("half a surrogate", 2)])
def test_a_bad_line_is_named_and_leaves_nothing(tmp_path: Path, capsys: Printed, case: str, workers: int) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(lines(["a", "b"]) + "\n" + BAD_LINES[case] + "\n" + lines(["c"]) + "also bad\n")
    assert "in.jsonl, line 4)" in refusal(capsys, path, "--output", tmp_path / "out", "--workers", workers)
    assert [child.name for child in tmp_path.iterdir()] == ["in.jsonl"]


REFUSED = {
    "no such file": ("none.txt", "(none.txt)"),
    "no tokenizer": ("a.txt --tokenizer b.jsonl", "(b.jsonl)"),
    "bytes that are no text": ("c.txt", "c.txt, byte 5000"),
    "the root": ("a.txt --output /", "(/)"),
    "a side without documents": ("b.jsonl --valid-fraction 0.001", "--valid-fraction"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_made_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed, case: str
) -> None:
    words, named = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.jsonl").write_text(lines(["b"]))
    (tmp_path / "c.txt").write_bytes(b"word " * 1000 + b"\xff")
    assert named in refusal(capsys, "--output", "out", "--workers", "1", *words.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.jsonl", "c.txt"]


@pytest.mark.parametrize("option", ["--valid-fraction=1", "--file-tokens=0"])
def test_numbers_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["a.txt", "--output", "out", option])


def test_what_is_there_is_not_replaced(tmp_path: Path, capsys: Printed) -> None:
    source, out = tmp_path / "in.txt", tmp_path / "out"
    source.write_text("one")
    command = [str(source), "--output", str(out), "--workers", "1"]
    assert main(command) == 0
    first = content(out)
    source.write_text("two")
    assert "(out)" in refusal(capsys, *command).replace(f"{tmp_path}/", "")
    assert content(out) == first
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("file")
    for name, existing in (("file", tmp_path / "file"), ("link", tmp_path / "file"), ("/", "/")):
        assert f"already exists ({existing})" in refusal(capsys, source, "--output", tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "in.txt", "link", "out"]


@pytest.mark.parametrize("name", ["it's [1]", "a\\'b, c", "back\\", "äö = {x}"])
def test_the_printed_keys_name_the_files_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed, name: str
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    Path("in.txt").write_text("one and one " * 9)
    Path("tokenizer.json").write_bytes(small_tokenizer())
    options = ["--tokenizer", "tokenizer.json", "--file-tokens", "10", "--workers", "1", "--valid-fraction", "0.1"]
    assert main(["in.txt", "--output", "out", *options]) == 0
    config = compose(shlex.split(capsys.readouterr().out.splitlines()[-1]))
    data = config.data
    assert config.model.vocab_size == 320
    monkeypatch.chdir("/")
    found = [path for pattern in (data.train, data.valid) for path in find_files(str(pattern))]
    assert found == sorted((tmp_path / name / "out").iterdir())
    assert data.tokenizer == str(tmp_path / name / "tokenizer.json")


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.txt").write_text("one")
    # Where the tests are started in the background, a SIGINT is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(os, "fsync", lambda _: signal.raise_signal(signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            main([str(tmp_path / "in.txt"), "--output", str(tmp_path / "out"), "--workers", "1"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


def _die_at_call(calls: int, arguments: list[str]) -> None:
    """Prepare a folder, and die at the n-th of the calls that make files durable or give them their names."""
    left = itertools.count(calls, -1)

    def dying(call: Callable[..., object], *given: object, **named: object) -> object:
        if next(left) <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*given, **named)

    for name in ("mkdir", "fsync", "replace", "rename"):
        setattr(os, name, partial(dying, getattr(os, name)))
    os._exit(main(arguments))


def test_a_call_killed_anywhere_leaves_no_half_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "new.jsonl").write_text(lines([prose(10, seed) for seed in range(20)]))
    command = [f"{tmp_path}/new.jsonl", "--valid-fraction", "0.5"]
    prepared(tmp_path / "new", *command)
    new = content(tmp_path / "new")
    seen, statuses = [], list[int | None]()
    while 0 not in statuses:
        folder = tmp_path / str(len(statuses))
        folder.mkdir()
        arguments = [*command, "--output", str(folder / "out"), "--workers", "1"]
        process = multiprocessing.get_context("fork").Process(target=_die_at_call, args=(len(statuses), arguments))
        process.start()
        process.join()
        statuses.append(process.exitcode)
        seen.append([content(path) for path in folder.iterdir() if path.suffix != ".partial"])
        prepared(folder / "out", *command)
        assert content(folder / "out") == new
    assert set(statuses[:-1]) == {-signal.SIGKILL}
    assert seen == sorted(seen)
    assert seen[0] == []
    assert seen[-1] == [new]
    assert len(seen) > 8


def test_megatrons_format_holds_the_same_tokens(tmp_path: Path, capsys: Printed) -> None:
    (tmp_path / "texts.jsonl").write_text(lines([prose(10, seed=n) for n in range(20)]))
    command = [f"{tmp_path}/texts.jsonl", "--valid-fraction", "0.3", "--file-tokens", "700"]
    tokens = prepared(tmp_path / "plain", *command)
    capsys.readouterr()
    assert main([*command, "--output", str(tmp_path / "indexed"), "--format", "megatron"]) == 0
    keys = shlex.split(capsys.readouterr().out.splitlines()[-1])
    files = corpus.prepare(compose(["model=gpt2_tiny", *keys]).data, cache=tmp_path / "cache")
    assert [path.name for path in files.train + files.valid] == sorted(content(tmp_path / "plain"))
    assert [token for path in files.train + files.valid for token in open_indexed_file(path).read().tolist()] == tokens
