"""Token files made once from large files: every text comes back, whoever did the work, and nothing appears half."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.harness import TINY, call_on_ranks, compose, curve, run_ok
from tests.profiles import examples
from trainer.commands.prepare_data import main
from trainer.data.blocks import SplitRule, TextForm, read_blocks, start_of_character
from trainer.data.bpe import train_bpe
from trainer.data.corpus import prepare
from trainer.data.digest_file import beside, digest_of
from trainer.data.encoding import Encoded, encode_block, in_order
from trainer.data.indexed_file import open_indexed_file
from trainer.data.prepared import PrepareOptions, write_prepared
from trainer.data.text import bytes_encoder, find_files, load_encoder
from trainer.data.text_file import Span
from trainer.data.token_file import open_token_file

WORDS = ["checkpoint", "wörter", "日本語。", "it's", "1234567", "...\n\n", "  ", "\t", "\r\n", "🙂", "x=y;", "Zeile\n"]


def prose(count: int, seed: int = 0) -> str:
    """Return text with white space, signs and characters of one to four bytes in any order."""
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(count))


def lines(texts: list[str], key: str = "text") -> str:
    return "".join(json.dumps({key: text, "id": number}) + "\n" for number, text in enumerate(texts))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def tokens(path: Path) -> list[int]:
    return [int(token) for token in open_token_file(path).read()]


def documents(path: Path, end: int) -> list[list[int]]:
    """Return the tokens of each document of a file, which ends with an end-of-text token."""
    found: list[list[int]] = [[]]
    for token in tokens(path):
        if token == end:
            found.append([])
        else:
            found[-1].append(token)
    assert found.pop() == []
    return found


@pytest.mark.parametrize("form", TextForm)
def test_the_files_do_not_depend_on_the_number_of_processes(tmp_path: Path, form: TextForm) -> None:
    paths = [tmp_path / f"{number}.{form.value}" for number in range(4)]
    for number, path in enumerate(paths):
        texts = [prose(40, seed=100 * number + part) for part in range(20)]
        path.write_text(lines(texts) if form is TextForm.jsonl else "".join(texts), newline="")
    wanted = PrepareOptions(form, train_vocab_size=400, valid_fraction=0.4, file_tokens=2000, block_bytes=500)
    for workers in (1, 2, 3):
        write_prepared(tmp_path / f"by{workers}", paths, wanted, workers=workers)
    found = content(tmp_path / "by1")
    assert found == content(tmp_path / "by2") == content(tmp_path / "by3")
    assert {"tokenizer.json", "train_000000.bin", "train_000001.bin", "valid_000000.bin"} <= set(found)
    assert not list(tmp_path.glob(".*"))


@cache
def small_tokenizer() -> bytes:
    return train_bpe([prose(60)], 320)


# A file with NUL is not text.
CHARACTERS = st.characters(exclude_categories=("Cs",), exclude_characters="\0")
TEXTS = st.lists(st.text(CHARACTERS) | st.sampled_from(WORDS), max_size=6)


@examples(30)
@given(texts=TEXTS, block_bytes=st.integers(1, 40))
@example(texts=["<|endoftext|>", "a<|endoftext|>\n"], block_bytes=3)
def test_what_was_encoded_decodes_to_the_text(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], block_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_bytes(small_tokenizer())
    decoder = Tokenizer.from_file(str(tokenizer))
    jsonl, whole = folder / "texts.jsonl", folder / "whole.txt"
    jsonl.write_text(lines(texts))
    whole.write_bytes("".join(texts).encode())
    for form, path, expected in ((TextForm.jsonl, jsonl, texts), (TextForm.text, whole, ["".join(texts)])):
        if not any(expected) and (form is TextForm.text or not texts):
            continue
        for named in (None, tokenizer):
            out = folder / f"{form.value}-{named is None}"
            wanted = PrepareOptions(form, tokenizer=named, block_bytes=block_bytes)
            made = write_prepared(out, [path], wanted, workers=1)
            found = documents(out / "train_000000.bin", made.end_of_text)
            assert made.sides[0].documents == len(found) == len(expected)
            if named is None:
                assert [bytes(ids).decode() for ids in found] == expected
            else:
                assert [decoder.decode(ids, skip_special_tokens=False) for ids in found] == expected


@examples(100)
@given(st.binary(max_size=12) | st.text(max_size=6).map(str.encode))
def test_a_cut_never_falls_into_a_character(text: bytes) -> None:
    at = start_of_character(text, len(text))
    assert len(text) - 3 <= at <= len(text)
    if at < len(text):  # what is left out is the beginning of a character, never a whole one
        with pytest.raises(UnicodeDecodeError):
            text[at:].decode()


def test_a_text_cut_into_blocks_gives_the_tokens_of_the_whole(tmp_path: Path) -> None:
    text = "".join(f"line {number}, it's   said.\n\n\tNext: x = {number**3};\n" for number in range(300)).encode()
    path, tokenizer = tmp_path / "long.txt", tmp_path / "tokenizer.json"
    path.write_bytes(text)
    tokenizer.write_bytes(train_bpe([text.decode()], 500))
    encoder = load_encoder(tokenizer)
    blocks = list(read_blocks(Span(path, 0, len(text)), TextForm.text, encoder.cuts(), block_bytes=100))
    assert len(blocks) > 100
    found = np.concatenate([encode_block(block, SplitRule(TextForm.text), encoder).tokens for block in blocks])
    whole = next(iter(read_blocks(Span(path, 0, len(text)), TextForm.text, encoder.cuts())))
    assert found.tolist() == encode_block(whole, SplitRule(TextForm.text), encoder).tokens.tolist()


def test_only_so_many_blocks_are_in_memory() -> None:
    started = taken = 0

    def start() -> Future[Encoded | str]:
        nonlocal started
        started += 1
        assert started - taken <= 4
        future: Future[Encoded | str] = Future()
        future.set_result(Encoded(np.empty(0, np.uint16), 1, 1))
        return future

    for _ in in_order((start for _ in range(50)), most=4):
        taken += 1
    assert started == taken == 50


def test_equal_texts_are_on_one_side_whatever_their_order(tmp_path: Path) -> None:
    texts = [f"document {number % 50}" for number in range(200)]
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    one.write_text(lines(texts))
    other.write_text(lines(texts[::-1]))
    sides = []
    for path in (one, other):
        made = write_prepared(
            tmp_path / path.stem, [path], PrepareOptions(TextForm.jsonl, valid_fraction=0.3), workers=1
        )
        assert sum(side.documents for side in made.sides) == 200
        sides.append([{tuple(ids) for ids in documents(side.files[0], 256)} for side in made.sides])
    assert sides[0] == sides[1]
    train, valid = sides[0]
    assert train
    assert valid
    assert not train & valid


def test_a_single_text_gives_its_end_to_valid(tmp_path: Path) -> None:
    text = "äöü" * 100
    (tmp_path / "text.txt").write_text(text)
    made = write_prepared(
        tmp_path / "out", [tmp_path / "text.txt"], PrepareOptions(TextForm.text, valid_fraction=0.25), workers=1
    )
    train, valid = (bytes(documents(side.files[0], 256)[0]).decode() for side in made.sides)
    assert train + valid == text
    assert len(valid) == pytest.approx(75, abs=1)


def test_a_run_trains_on_what_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text(lines([prose(30, seed) for seed in range(60)], key="content"))
    command = [str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out"), "--key", "content", "--workers", "2"]
    split = ["--valid-fraction", "0.2", "--file-tokens", "1000"]
    assert main([*command, *split, "--tokenizer", "train-bpe", "300"]) == 0
    printed = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert "model.vocab_size=300" in printed
    assert compose(printed).data.train == f"{tmp_path}/out/train_*.bin"
    run_ok(tmp_path / "run", [*TINY, *printed, "train.train_iters=3", "train.eval_interval=3"])
    assert [row[0] for row in curve(tmp_path / "run")] == [1, 2, 3]


BAD_LINES = {
    "not JSON": ('{"text": "a"', "no JSON"),
    "no object": ('["a"]', "no JSON object"),
    "no text": ('{"body": "a"}', "only the keys ['body']"),
    "a number": ('{"text": 3}', "int under 'text'"),
    "half a surrogate": ('{"text": "\\ud800"}', "surrogate"),
    "too deep": ('{"text": ' + "[" * 100_000, "no JSON"),
}


@pytest.mark.parametrize("case", BAD_LINES)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_is_named_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, workers: int
) -> None:
    line, problem = BAD_LINES[case]
    path = tmp_path / "in.jsonl"
    path.write_text(lines(["a", "b"]) + "\n" + line + "\n" + lines(["c"]) + "also bad\n")
    assert main([str(path), "--output", str(tmp_path / "out"), "--workers", str(workers)]) == 2
    error = capsys.readouterr().err
    assert "in.jsonl, line 4)" in error
    assert problem in error
    assert [child.name for child in tmp_path.iterdir()] == ["in.jsonl"]


def test_bytes_that_are_no_text_are_named_by_their_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_bytes(b"word " * 1000 + b"\xff")
    arguments = [str(tmp_path / "in.txt"), "--output", str(tmp_path / "out"), "--tokenizer", "train-bpe", "300"]
    assert main(arguments) == 2
    assert "in.txt, byte 5000" in capsys.readouterr().err


REFUSED = {
    "no such file": (["none.txt"], "no file matches"),
    "two forms": (["a.txt", "b.jsonl"], "two forms"),
    "tokenizer": (["a.txt", "--tokenizer", "train-bpe"], "train-bpe N"),
    "a small vocabulary": (["a.txt", "--tokenizer", "train-bpe", "256"], "at least 257"),
    "no tokenizer": (["a.txt", "--tokenizer", "b.jsonl"], "a tokenizer cannot be loaded"),
    "fraction": (["a.txt", "--valid-fraction", "1"], "above 0 and below 1"),
    "file size": (["a.txt", "--file-tokens", "0"], "1 to 2147483647"),
    "the root": (["a.txt", "--output", "/"], "A folder is there already (/)"),
    "a side without documents": (["b.jsonl", "--valid-fraction", "0.001"], "--valid-fraction"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_made_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    arguments, message = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.jsonl").write_text(lines(["b"]))
    assert main(["--output", "out", "--workers", "1", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.jsonl"]


def test_a_folder_is_replaced_only_with_force_and_if_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_text("one")
    command = [str(tmp_path / "in.txt"), "--output", str(tmp_path / "out"), "--workers", "1"]
    assert main(command) == 0
    first = content(tmp_path / "out")
    (tmp_path / "in.txt").write_text("two")
    assert main(command) == 2
    assert "--force" in capsys.readouterr().err
    assert content(tmp_path / "out") == first
    made = tmp_path / "out/train_000000.bin"
    digest_of(open_token_file(made), cache=tmp_path / "cache")  # as a run does that reads the folder
    beside(made).touch()  # nothing is kept of a file that was written in the same tick
    assert main([*command, "--force"]) == 0
    assert not beside(made).exists()
    assert content(tmp_path / "out") != first
    (tmp_path / "out/notes.txt").write_text("mine")
    assert main([*command, "--force"]) == 2
    assert "notes.txt" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "in.txt"), "--output", str(tmp_path / "file"), "--force"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "in.txt", "out"]


def test_a_tokenizer_in_the_folder_that_is_replaced_survives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("one and one")
    out = tmp_path / "out"
    command = [str(tmp_path / "in.txt"), "--output", str(out), "--workers", "1", "--force"]
    assert main([*command, "--tokenizer", "train-bpe", "260"]) == 0
    before = content(out)
    assert main([*command, "--tokenizer", str(out / "tokenizer.json")]) == 2
    assert "tokenizer.json" in capsys.readouterr().err
    assert main([str(out / "train_*.bin"), *command[1:]]) == 2
    assert content(out) == before


@pytest.mark.parametrize("name", ["it's [1]", "a\\'b, c", "back\\", "äö = {x}"])
def test_the_printed_keys_name_the_files_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    Path("in.txt").write_text("one and one " * 9)
    Path("tokenizer.json").write_bytes(small_tokenizer())
    options = ["--tokenizer", "tokenizer.json", "--file-tokens", "10", "--workers", "1", "--valid-fraction", "0.1"]
    assert main(["in.txt", "--output", "out", *options]) == 0
    data = compose(shlex.split(capsys.readouterr().out.splitlines()[-1])).data
    monkeypatch.chdir("/")
    found = [path for pattern in (data.train, data.valid) for path in find_files(str(pattern))]
    assert found == sorted((tmp_path / name / "out").iterdir())
    assert data.tokenizer == str(tmp_path / name / "tokenizer.json")


def test_an_interrupt_leaves_nothing_and_ends_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("one")
    # Where the tests are started in the background, a SIGINT is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(os, "fsync", lambda _: signal.raise_signal(signal.SIGINT))
    try:
        assert main([str(tmp_path / "in.txt"), "--output", str(tmp_path / "out"), "--workers", "1"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "reprise prepare-data: interrupted, nothing is left\n"
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


CALLS = ("mkdir", "fsync", "replace", "rename")


def _die_at_call(arguments: list[str]) -> None:
    """Prepare a folder, and die at the n-th of the calls that make files durable or give them their names."""
    left = int(arguments.pop(0))

    def dying(call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*given: object, **named: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*given, **named)

        return wrapped

    for name in CALLS:
        setattr(os, name, dying(getattr(os, name)))
    if main(arguments):
        raise SystemExit(1)


def test_a_run_killed_anywhere_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(lines([prose(10, seed) for seed in range(20)]))
    command = [
        str(tmp_path / "in.jsonl"),
        "--workers",
        "1",
        "--valid-fraction",
        "0.5",
        "--tokenizer",
        "train-bpe",
        "300",
    ]
    assert main([*command, "--output", str(tmp_path / "whole")]) == 0
    statuses = []
    for calls in range(20):
        out = tmp_path / f"out{calls}"
        arguments = [str(calls), *command, "--output", str(out)]
        ended = call_on_ranks(_die_at_call, arguments, folder=tmp_path / "logs" / str(calls), ranks=1)
        statuses.append(*ended.statuses)
        if ended.ok:
            break
        # The last call makes the name itself durable.
        assert not out.exists() or content(out) == content(tmp_path / "whole")
        assert main([*command, "--output", str(out), "--force"]) == 0
        assert content(out) == content(tmp_path / "whole")
    assert statuses[-1] == 0
    assert len(statuses) > 8
    assert set(statuses[:-1]) == {-9}


def test_a_replacement_killed_anywhere_loses_neither_folder(tmp_path: Path) -> None:
    texts = [tmp_path / "old.txt", tmp_path / "new.txt"]
    for path in texts:
        path.write_text(path.stem)
        assert main([str(path), "--output", str(tmp_path / path.stem), "--workers", "1"]) == 0
    old, new = (content(tmp_path / path.stem) for path in texts)
    seen = []
    for calls in range(20):
        folder = tmp_path / str(calls)
        shutil.copytree(tmp_path / "old", folder / "out")
        arguments = [str(calls), str(texts[1]), "--output", str(folder / "out"), "--workers", "1", "--force"]
        ended = call_on_ranks(_die_at_call, arguments, folder=tmp_path / "logs" / str(calls), ranks=1)
        whole = {path.suffix: content(path) for path in folder.iterdir() if path.suffix != ".partial"}
        seen.append((whole.get(""), whole.get(".replaced")))
        if ended.ok:
            break
    before, aside, both, after = (old, None), (None, old), (new, old), (new, None)
    assert seen == sorted(seen, key=[before, aside, both, after].index)
    assert seen[0] == before
    assert aside in seen
    assert seen[-1] == after


def test_bytes_and_their_end_are_the_tokens_by_default(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\x01ÿab".encode())
    made = write_prepared(tmp_path / "out", [tmp_path / "a.txt"], PrepareOptions(TextForm.text), workers=1)
    assert tokens(made.sides[0].files[0]) == [1, 0xC3, 0xBF, 97, 98, 256]
    assert (made.vocab_size, made.end_of_text) == (257, bytes_encoder().end_of_text)


def test_megatrons_format_holds_the_same_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts.jsonl").write_text(lines([prose(10, seed=n) for n in range(20)]))
    command = [str(tmp_path / "texts.jsonl"), "--valid-fraction", "0.3", "--file-tokens", "700"]
    assert main([*command, "--output", str(tmp_path / "plain")]) == 0
    plain = capsys.readouterr().out.splitlines()
    assert main([*command, "--output", str(tmp_path / "indexed"), "--format", "megatron"]) == 0
    indexed = capsys.readouterr().out.splitlines()
    assert indexed[:-1] == plain[:-1]
    assert shlex.split(indexed[-1])[0] == "data=megatron"
    names = {path.name for path in (tmp_path / "plain").iterdir()}
    assert {path.name for path in (tmp_path / "indexed").glob("*.bin")} == names
    for name in names:
        file = open_indexed_file(tmp_path / "indexed" / name)
        assert file.read().tolist() == tokens(tmp_path / "plain" / name)
    config = compose(["model=gpt2_tiny", *shlex.split(indexed[-1])])
    assert prepare(config.data, cache=tmp_path / "cache").train == tuple(
        sorted((tmp_path / "indexed").glob("train*.bin"))
    )
    assert main([*command, "--output", str(tmp_path / "indexed"), "--format", "megatron", "--force"]) == 0
