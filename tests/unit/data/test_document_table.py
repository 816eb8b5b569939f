"""The table of a file's documents: the samples of whole indexes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from reprise.errors import DataError
from tests.messages import refused
from tests.unit.data.test_indexed_file import by_hand
from trainer.data.document_index import HEADER
from trainer.data.document_table import STRIDE, table_of
from trainer.data.indexed_file import open_indexed_file
from trainer.data.token_file import TokenFile

Ints = npt.NDArray[np.int64]
SEQ_LENGTH = 7


def lengths_of(count: int) -> Ints:
    """Return lengths of documents, a third of which have no sample."""
    rng = np.random.default_rng(count)
    return rng.integers(0, 40, count) * (rng.random(count) < 0.7)


def megatron(path: Path, lengths: Ints, *, sentences: int = 1) -> TokenFile:
    """Write files of zeros whose documents have `sentences` sequences each, all but the first of a token."""
    sequences = [np.zeros(size) for length in lengths for size in (length, *[1] * (sentences - 1))]
    return open_indexed_file(by_hand(path, sequences, document_sequences=sentences))


def expected_samples(lengths: Ints) -> tuple[Ints, Ints]:
    """Return begin of each sample and end of its document, document by document."""
    ends = np.cumsum(lengths)
    pairs = [
        (start, end)
        for length, end in zip(lengths.tolist(), ends.tolist(), strict=True)
        for start in range(end - length, end - 1, SEQ_LENGTH)
    ]
    starts, stops = np.array(pairs, np.int64).reshape(-1, 2).T
    return starts, stops


@pytest.fixture(params=[1 << 18, STRIDE], ids=["a piece", "pieces"])
def pieces(request: pytest.FixtureRequest) -> Iterator[None]:
    """Read indexes at once, and in pieces."""
    with mock.patch("trainer.data.document_table.READ_DOCUMENTS", request.param):
        yield


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("sentences", [1, 3])
@pytest.mark.parametrize("count", [1, STRIDE - 1, STRIDE, 3 * STRIDE, 3 * STRIDE + 5])
def test_every_sample_is_where_its_document_has_it(tmp_path: Path, sentences: int, count: int) -> None:
    lengths = lengths_of(count) + 2 * (count == 1)
    documents = megatron(tmp_path / "a.bin", lengths, sentences=sentences)
    lengths = lengths + sentences - 1
    table = table_of(documents, SEQ_LENGTH)
    starts, stops = expected_samples(lengths)
    assert table.samples == starts.size
    order = np.random.default_rng(0).permutation(table.samples)
    located = [table.locate(sample) for sample in order.tolist()]
    assert located == [*zip(starts[order].tolist(), stops[order].tolist(), strict=True)]
    borders = np.append(0, np.cumsum(lengths))
    assert table.digest == xxhash.xxh3_64_hexdigest(borders.data), "the record of every run has this digest"
    assert documents.documents is not None
    assert np.array_equal(documents.documents.borders(count // 2, count), borders[count // 2 :])
    begins = np.unique(borders[:-1][lengths > 0])
    for start in (0, 1, int(borders[-1]) // 2, int(begins[-1]), int(borders[-1])):
        for stop in (start, start + 1, start + 999, int(borders[-1])):
            expected = begins[(start <= begins) & (begins < stop)]
            assert table.starts_in(start, stop).tolist() == expected.tolist()


def test_an_index_without_documents_has_the_digest_of_its_border(tmp_path: Path) -> None:
    table = table_of(megatron(tmp_path / "a.bin", lengths_of(0)), SEQ_LENGTH)
    assert table.samples == 0
    assert table.digest == xxhash.xxh3_64_hexdigest(bytes(8))


def test_an_index_overwritten_in_use_is_refused(tmp_path: Path) -> None:
    lengths = np.full(STRIDE + 1, 10)
    table = table_of(megatron(tmp_path / "a.bin", lengths), SEQ_LENGTH)
    index, offsets_at = tmp_path / "a.idx", HEADER.size + 4 * lengths.size
    with index.open("r+b") as file:
        file.seek(offsets_at)
        file.write(np.arange(0, 10, 2, dtype="<i8").tobytes())
    with refused(DataError, "a.idx"):
        table.locate(0)
    with index.open("r+b") as file:
        file.seek(offsets_at + 8 * STRIDE)
        file.write(np.array([20 * STRIDE + 2], "<i8").tobytes())
    with refused(DataError, "a.idx"):
        table.starts_in(0, 50)
    with index.open("r+b") as file:
        file.truncate(8)
    with refused(DataError, "a.idx"):
        table.locate(0)
