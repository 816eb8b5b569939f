"""Runs read data that Megatron-Core wrote, and Megatron-Core reads ours. Without it installed, these are skipped."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from models.layers import attention_mask, document_positions
from trainer.data.batches import Samples
from trainer.data.documents import DocumentMarks, WindowForm
from trainer.data.indexed_file import open_indexed_file, write_indexed_file

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

END = 256


@pytest.fixture(scope="module")
def megatron() -> Any:
    pytest.importorskip("megatron.core")
    from megatron.core.datasets import indexed_dataset

    return indexed_dataset


def documents() -> list[np.ndarray]:
    """Return documents of random bytes, an empty one among them, each followed by the end of text."""
    rng = np.random.default_rng(1)
    return [np.append(rng.integers(0, 256, size), END) for size in (700, 0, 33, 1500, 1, 900)]


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


@pytest.mark.parametrize("seq_length", [7, 64, 1000])
def test_samples_are_those_of_gpt_dataset(
    tmp_path: Path, megatron: Any, monkeypatch: pytest.MonkeyPatch, seq_length: int
) -> None:
    """Without Megatron's two shuffles its samples of one epoch are ours, in order."""
    from megatron.core.datasets import gpt_dataset
    from megatron.core.datasets.utils import Split

    monkeypatch.setattr(gpt_dataset, "_build_document_index", lambda documents, *_: np.asarray(documents, np.int32))
    monkeypatch.setattr(gpt_dataset, "_build_shuffle_index", lambda _, total, *__: np.arange(total, dtype=np.uint32))
    write_indexed_file(tmp_path / "ours.bin", documents(), dtype=np.dtype(np.uint16), end_of_text=END)
    tokenizer = SimpleNamespace(eod=END, pad=None, vocab_size=257, unique_identifiers={"class": "none"})
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=1,
        sequence_length=seq_length,
        blend=([str(tmp_path / "ours")], None),
        split="1",
        path_to_cache=None,
        tokenizer=tokenizer,
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=False,
    )
    indexed = megatron.IndexedDataset(str(tmp_path / "ours"), mmap=True)
    theirs = gpt_dataset.GPTDataset(indexed, str(tmp_path / "ours"), np.arange(len(indexed)), None, Split.train, config)
    file = open_indexed_file(tmp_path / "ours.bin")
    samples = Samples([file], seq_length=seq_length, marks=DocumentMarks(None))
    assert len(theirs) == samples.count
    inputs = WindowForm(masks_documents=True).split(torch.from_numpy(samples.windows(np.arange(samples.count))))
    assert inputs.starts is not None
    mask = attention_mask(inputs.starts)
    for number in range(samples.count):
        sample = theirs[number]
        assert sample["tokens"].tolist() == inputs.tokens[number].tolist()
        assert sample["labels"].tolist() == inputs.targets[number].tolist()
        assert sample["position_ids"].tolist() == document_positions(inputs.starts)[number].tolist()
        assert torch.equal(~sample["attention_mask"], mask[number])  # theirs is True where it hides
