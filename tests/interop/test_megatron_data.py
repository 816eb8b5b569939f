"""Runs read data that Megatron-Core wrote, and Megatron-Core reads ours. Without it installed, these are skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.faults.run_files import curve_of
from tests.harness import TINY, run_ok
from trainer.data.indexed_file import open_indexed_file, write_indexed_file
from trainer.data.token_file import write_token_file

VOCABULARY, END = 257, 256


@pytest.fixture(scope="module")
def megatron() -> Any:
    pytest.importorskip("megatron.core")
    from megatron.core.datasets import indexed_dataset

    return indexed_dataset


def documents() -> list[np.ndarray]:
    """Return documents of random bytes, an empty one among them, each followed by the end of text."""
    rng = np.random.default_rng(1)
    return [np.append(rng.integers(0, 256, size), END) for size in (700, 0, 33, 1500, 1, 900)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_tokens_are_those_of_megatrons_reader(tmp_path: Path, megatron: Any, dtype: type) -> None:
    prefix = str(tmp_path / "data_text_document")
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents():
        builder.add_document(document, [len(document) - 1, 1])
    builder.finalize(f"{prefix}.idx")
    theirs = megatron.IndexedDataset(prefix, mmap=True)
    ours = open_indexed_file(Path(f"{prefix}.bin"))
    assert ours.read().tolist() == np.concatenate([theirs[n] for n in range(len(theirs))]).tolist()


@pytest.mark.slow
def test_megatron_reads_the_documents_we_write(tmp_path: Path, megatron: Any) -> None:
    write_indexed_file(tmp_path / "ours.bin", documents(), dtype=np.dtype(np.uint16), end_of_text=END)
    theirs = megatron.IndexedDataset(str(tmp_path / "ours"), mmap=True)
    assert [theirs[n].tolist() for n in range(len(theirs))] == [document.tolist() for document in documents()]
    assert theirs.document_indices.tolist() == list(range(len(documents()) + 1))


def test_a_run_trains_as_on_a_token_file(tmp_path: Path) -> None:
    write_indexed_file(tmp_path / "ours.bin", documents(), dtype=np.dtype(np.uint16), end_of_text=END)
    write_token_file(tmp_path / "flat.tokens", documents(), dtype=np.uint16)
    curves = []
    for name, data in {
        "indexed": ["data=megatron", f"data.train={tmp_path}/ours"],
        "flat": ["data=token_file", f"data.train={tmp_path}/flat.tokens"],
    }.items():
        run_ok(tmp_path / name, [*TINY, *data, "train.train_iters=3", "train.eval_interval=0"])
        curves.append(curve_of(tmp_path / name))
    assert curves[0] == curves[1]
    assert len(curves[0]) == 3
