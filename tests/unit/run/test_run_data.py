"""The data that a run opens: nothing is trained on that it is validated on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from reprise.errors import DataError
from reprise.ranks import single_rank_channel
from tests.harness import TINY, compose
from tests.messages import refused
from tests.unit.start.test_decide import cluster_of
from trainer.data.indexed_file import write_indexed_file
from trainer.data.token_file import write_token_file
from trainer.run.run_data import open_data


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder as `reprise prepare-data --file-tokens 1000 --valid-fraction F` leaves it."""
    rng = np.random.default_rng(1)
    (tmp_path / "indexed").mkdir()
    for name in ("train_000000", "train_000001", "valid_000000"):
        tokens = rng.integers(0, 256, 1000)
        write_token_file(tmp_path / f"{name}.bin", [tokens], dtype=np.uint16)
        write_indexed_file(tmp_path / "indexed" / f"{name}.bin", [tokens], dtype=np.dtype(np.uint16), end_of_text=5)
    return tmp_path


def open_with(*overrides: str) -> None:
    config = compose(["model=gpt2_tiny", *TINY, "train.eval_interval=2", *overrides])
    open_data(config, cluster_of(single_rank_channel()))


@pytest.mark.parametrize("kind", ["token_file", "megatron"])
def test_the_validation_file_in_a_glob_is_refused(data: Path, kind: str) -> None:
    folder = data if kind == "token_file" else data / "indexed"
    keys = [f"data={kind}", f"data.valid={folder}/valid_000000.bin", f"data.cache={data}/cache"]
    open_with(*keys, f"data.train={folder}/train_*.bin")
    with refused(DataError, f"{folder}/valid_000000.bin"):
        open_with(*keys, f"data.train={folder}/*.bin")


@pytest.mark.parametrize("place", [shutil.copy, os.link, os.symlink])
def test_a_copy_or_a_link_is_the_same_file(data: Path, place: object) -> None:
    assert callable(place)
    (data / "other").mkdir()
    place(data / "train_000001.bin", data / "other/new.bin")
    keys = ["data=token_file", f"data.train={data}/train_*.bin"]
    with refused(DataError, "other/new.bin", "train_000001.bin"):
        open_with(*keys, f"data.valid=[{data}/valid_000000.bin, {data}/other/new.bin]")


def test_every_source_of_a_blend_is_compared(data: Path) -> None:
    blend = ",".join(f"{{path: {data}/{name}.bin, weight: 1}}" for name in ("train_000000", "valid_000000"))
    with refused(DataError, "valid_000000.bin"):
        open_with("data=token_file", f"data.train=[{blend}]", f"data.valid={data}/valid_000000.bin")


def test_files_with_one_beginning_and_other_ends_are_two(data: Path) -> None:
    tokens = np.arange(100_000) % 257
    for name in ("a", "b", "c"):
        tokens[-1] = ord(name)
        write_token_file(data / f"{name}.bin", [tokens], dtype=np.uint16)
    keys = ["data=token_file", f"data.valid={data}/c.bin"]
    open_with(*keys, f"data.train={data}/[ab].bin")
    shutil.copy(data / "c.bin", data / "b.bin")
    with refused(DataError, "b.bin"):
        open_with(*keys, f"data.train={data}/[ab].bin")


def test_two_texts_of_one_content_are_not_split(data: Path) -> None:
    for number in range(2):
        (data / f"{number}.txt").write_text("one text, twice. " * 30)
    with refused(DataError, "valid.bin"):
        open_with("data=text", f"data.path={data}/*.txt", f"data.cache={data}/cache")


def test_a_token_outside_the_vocabulary_is_refused(data: Path) -> None:
    write_token_file(data / "a.bin", [np.array([1, 256] * 500 + [300])], dtype=np.uint16)
    keys = ["data=token_file", f"data.train={data}/a.bin", "train.eval_interval=0"]
    with refused(DataError, "a.bin", "0 to 256", "found 300"):
        open_with(*keys)
    open_with(*keys, "model.vocab_size=301")
