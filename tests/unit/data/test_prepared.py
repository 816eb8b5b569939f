"""Arrays of tokens without a header, as nanoGPT writes them, become token files that a run reads."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from reprise.errors import DataError
from tests.bpe import train_bpe
from tests.harness import TINY, compose
from tests.messages import Printed, refused
from tests.unit.data.doors import refusal, tokens_of
from trainer.commands.prepare_data import main
from trainer.data import corpus as corpus_module
from trainer.data import prepared as module
from trainer.data.data_file import TokenArray
from trainer.data.prepared import PrepareOptions, write_prepared
from trainer.data.sources import text_sources
from trainer.data.text import open_encoder
from trainer.data.token_file import TokenFile, open_token_file, write_token_file

TOKENS = np.random.default_rng(2).integers(0, 60, 5000)
HELD_OUT = TOKENS[4000:4900]


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """Return a folder as nanoGPT's `prepare.py` leaves it."""
    for name, tokens in (("train", TOKENS), ("val", HELD_OUT)):
        tokens.astype("<u2").tofile(tmp_path / f"{name}.bin")
    return tmp_path


def words(folder: Path, *options: object, dtype: str = "uint16") -> list[str]:
    return [f"{folder}/train.bin", "--raw", dtype, "--output", f"{folder}/out", *map(str, options)]


def printed(capsys: Printed) -> list[str]:
    """Return the keys that the command prints last."""
    return shlex.split(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize(("dtype", "file_tokens"), [("uint16", 700), ("uint32", 1 << 30)])
def test_the_printed_keys_name_the_tokens_of_arrays(
    arrays: Path, capsys: Printed, dtype: str, file_tokens: int
) -> None:
    for name, tokens in (("train", TOKENS), ("val", HELD_OUT)):
        tokens.astype(dtype).tofile(arrays / f"{name}.bin")
    valid = ["--valid", str(arrays / "val.bin"), "--file-tokens", str(file_tokens)]
    assert main(words(arrays, *valid, dtype=dtype)) == 0
    keys = printed(capsys)
    assert keys[3:] == ["model.vocab_size=60", "model.bos_token_id=59", "model.eos_token_id=59"]
    config = compose(["model=gpt2_tiny", *TINY, *keys])
    corpus = corpus_module.prepare(config.data, cache=arrays / "cache")
    for paths, tokens in ((corpus.train, TOKENS), (corpus.valid, HELD_OUT)):
        assert len(paths) == -(-len(tokens) // file_tokens)
        assert tokens_of(paths) == tokens.tolist()
    assert open_token_file(corpus.train[0]).dtype == dtype


def test_a_named_tokenizer_gives_vocabulary_and_end_of_text(arrays: Path, capsys: Printed) -> None:
    path = arrays / "tokenizer.json"
    path.write_bytes(train_bpe(["one and two " * 9], 270))
    size = open_encoder(path).vocab_size
    for tokenizer, count in ((str(path), size), ("bytes", 257)):
        command = words(arrays, "--tokenizer", tokenizer)
        shutil.rmtree(arrays / "out", ignore_errors=True)
        assert main(command) == 0
        assert printed(capsys)[2:4] == [f"data.tokenizer={tokenizer}", f"model.vocab_size={count}"]
        np.array([1, count], "<u2").tofile(arrays / "train.bin")
        assert tokens_of(sorted(arrays.glob("out/train_*.bin"))) == TOKENS.tolist()
        shutil.rmtree(arrays / "out")
        assert f"found {count}" in refusal(capsys, *command)
        assert not (arrays / "out").exists()
        TOKENS.astype("<u2").tofile(arrays / "train.bin")


def test_files_that_are_no_arrays_are_refused_and_leave_nothing(arrays: Path, capsys: Printed) -> None:
    path, good = arrays / "train.bin", TOKENS.astype("<u2").tobytes()
    write_token_file(arrays / "tokens.bin", [TOKENS], dtype=np.uint16)
    np.save(arrays / "numpy.npy", TOKENS.astype("<u2"))
    for data, dtype in (
        (b"", "uint16"),
        (good[:-1], "uint16"),
        ((arrays / "tokens.bin").read_bytes(), "uint16"),
        ((arrays / "numpy.npy").read_bytes(), "uint16"),
        (good[:-2], "uint32"),
    ):
        path.write_bytes(data)
        before = sorted(os.listdir(arrays))
        assert str(path) in refusal(capsys, *words(arrays, dtype=dtype))
        assert sorted(os.listdir(arrays)) == before


@pytest.mark.parametrize("kind", ["array", "text"])
def test_a_wrong_file_is_refused_before_others_are_read(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a").write_text("a text of many bytes")
    (tmp_path / "b").write_bytes(b"\x89PNG\r\n\x1a\n\0")
    options, written = PrepareOptions(array=np.dtype("<u2") if kind == "array" else None), mock.Mock()
    with mock.patch.object(module, "write_token_file", written), refused(DataError, str(tmp_path / "b")):
        write_prepared(tmp_path / "out", text_sources(f"{tmp_path}/?"), options, workers=1)
    assert not written.called


def test_an_array_cut_off_while_it_is_read_is_named(arrays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = arrays / "train.bin", TokenFile.read

    def cut_off(file: TokenFile, start: int = 0, stop: int | None = None) -> TokenArray:
        os.truncate(path, 2001)
        return read(file, start, stop)

    monkeypatch.setattr(TokenFile, "read", cut_off)
    with refused(DataError, "train.bin", "2001 bytes"):
        write_prepared(arrays / "out", text_sources(str(path)), PrepareOptions(array=np.dtype("<u2")), workers=1)
    assert not (arrays / "out").exists()


RAW = "--raw uint16"


@pytest.mark.parametrize(
    "options", [f"{RAW} --form text", f"{RAW} --valid-fraction 0.1", f"{RAW} --format megatron", "--valid x"]
)
def test_what_is_said_of_texts_is_refused(arrays: Path, capsys: Printed, options: str) -> None:
    assert "--raw" in refusal(capsys, arrays / "train.bin", "--output", arrays / "out", *options.split())
    assert not (arrays / "out").exists()


def test_a_run_on_a_headerless_file_is_refused_with_a_remedy(arrays: Path) -> None:
    with refused(DataError, "train.bin", "prepare-data --raw"):
        open_token_file(arrays / "train.bin")
