"""Arrays of tokens without a header, as nanoGPT writes them, become token files that a run reads."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import numpy as np
import pytest

from reprise.errors import DataError
from tests.harness import TINY, run_ok
from trainer.commands.prepare_data import main
from trainer.data.bpe import train_bpe
from trainer.data.text import find_files
from trainer.data.token_file import open_token_file, write_token_file

TOKENS = np.random.default_rng(2).integers(0, 60, 5000)
HELD_OUT = TOKENS[4000:4900]


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """Return a folder as nanoGPT's `prepare.py` leaves it."""
    for name, tokens in (("train", TOKENS), ("val", HELD_OUT)):
        tokens.astype("<u2").tofile(tmp_path / f"{name}.bin")
    return tmp_path


def prepare(folder: Path, *options: str, dtype: str = "uint16") -> int:
    return main([str(folder / "train.bin"), "--raw", dtype, "--output", str(folder / "out"), *options])


def read(pattern: str) -> list[int]:
    return [token for path in find_files(pattern) for token in open_token_file(path).read().tolist()]


@pytest.mark.parametrize(("dtype", "file_tokens"), [("uint16", 1 << 30), ("uint16", 700), ("uint32", 1 << 30)])
def test_a_run_trains_on_the_tokens_of_arrays(
    arrays: Path, capsys: pytest.CaptureFixture[str], dtype: str, file_tokens: int
) -> None:
    for name, tokens in (("train", TOKENS), ("val", HELD_OUT)):
        tokens.astype(dtype).tofile(arrays / f"{name}.bin")
    valid = ["--valid", str(arrays / "val.bin"), "--file-tokens", str(file_tokens)]
    assert prepare(arrays, *valid, dtype=dtype) == 0
    said = capsys.readouterr().out.splitlines()
    files = -(-len(TOKENS) // file_tokens), -(-len(HELD_OUT) // file_tokens)
    counts = ["1 file" if count == 1 else f"{count} files" for count in files]
    assert said[:2] == [f"train: 5,000 tokens, {counts[0]}", f"valid: 900 tokens, {counts[1]}"]
    assert "token 59, the largest, is taken for the end of text" in said[2]
    overrides = shlex.split(said[-1])
    assert overrides[3:] == ["model.vocab_size=60", "model.bos_token_id=59", "model.eos_token_id=59"]
    assert read(f"{arrays}/out/train_*.bin") == TOKENS.tolist()
    assert read(f"{arrays}/out/valid_*.bin") == HELD_OUT.tolist()
    assert open_token_file(arrays / "out/train_000000.bin").dtype == dtype
    short = ["train.train_iters=2", "schedule.lr_warmup_iters=0", "train.eval_interval=2", "train.eval_iters=1"]
    ended = run_ok(arrays / "run", ["model=gpt2_tiny", *TINY, *overrides, *short])
    assert "valid loss" in ended.text


def test_a_named_tokenizer_gives_vocabulary_and_end_of_text(arrays: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (arrays / "tokenizer.json").write_bytes(train_bpe(["one and two " * 9], 270))
    assert prepare(arrays, "--tokenizer", str(arrays / "tokenizer.json")) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2
    assert f"data.tokenizer={arrays}/tokenizer.json" in shlex.split(said[-1])
    assert "model.vocab_size=" in said[-1]
    assert "model.vocab_size=60" not in said[-1]
    np.array([1, 60000], "<u2").tofile(arrays / "train.bin")
    assert prepare(arrays, "--tokenizer", str(arrays / "tokenizer.json"), "--force") == 2
    assert "found 60000" in capsys.readouterr().err
    assert read(f"{arrays}/out/train_*.bin") == TOKENS.tolist()


def test_bytes_are_a_tokenizer_that_can_be_named(arrays: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare(arrays, "--tokenizer", "bytes") == 0
    (_, overrides) = capsys.readouterr().out.splitlines()
    assert shlex.split(overrides)[2:4] == ["data.tokenizer=bytes", "model.vocab_size=257"]
    np.array([1, 257], "<u2").tofile(arrays / "train.bin")
    assert prepare(arrays, "--tokenizer", "bytes", "--force") == 2
    assert "expected 0 to 256, found 257" in capsys.readouterr().err


def test_files_that_are_no_arrays_are_refused_and_leave_nothing(
    arrays: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = arrays / "train.bin"
    good = path.read_bytes()
    write_token_file(arrays / "tokens.bin", [TOKENS], dtype=np.uint16)
    np.save(arrays / "numpy.npy", TOKENS.astype("<u2"))
    for data, words in (
        (b"", "found 0 bytes"),
        (good[:-1], "found 9999 bytes"),
        ((arrays / "tokens.bin").read_bytes(), "token file already"),
        ((arrays / "numpy.npy").read_bytes(), "NumPy array with a header"),
    ):
        path.write_bytes(data)
        before = sorted(os.listdir(arrays))
        assert prepare(arrays) == 2
        error = capsys.readouterr().err
        assert words in error
        assert str(path) in error
        assert sorted(os.listdir(arrays)) == before
    path.write_bytes(good[: len(good) - 2])
    assert prepare(arrays, dtype="uint32") == 2
    assert "4 bytes a token" in capsys.readouterr().err


def test_an_array_on_both_sides_is_refused(arrays: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (arrays / "copy.bin").write_bytes((arrays / "val.bin").read_bytes())
    for valid in ("train.bin", "val.bin"):
        command = [str(arrays / "train.bin"), str(arrays / "copy.bin"), "--valid", str(arrays / valid)]
        assert main([*command, "--raw", "uint16", "--output", str(arrays / "out")]) == 2
        assert f"in the training data and in the validation data ({arrays / valid})" in capsys.readouterr().err
    assert not (arrays / "out").exists()


@pytest.mark.parametrize("option", ["--form text", "--valid-fraction 0.1", "--tokenizer train-bpe 300"])
def test_what_is_said_of_texts_is_refused(arrays: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert prepare(arrays, *option.split()) == 2
    assert "--raw takes tokens, no texts" in capsys.readouterr().err
    assert main([str(arrays / "train.bin"), "--valid", "x", "--output", str(arrays / "out")]) == 2
    assert "--valid goes with --raw only" in capsys.readouterr().err
    assert not (arrays / "out").exists()


def test_a_run_on_a_headerless_file_is_refused_with_a_remedy(arrays: Path) -> None:
    with pytest.raises(DataError, match=r"unknown header.*train\.bin.*prepare_data --raw"):
        open_token_file(arrays / "train.bin")
