"""Samples and batches: windows within files, and each position of a global batch read once by someone."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reprise.errors import DataError
from tests.fakes import tokens_in_memory
from tests.profiles import examples
from trainer.data.batches import Samples, micro_batch_positions
from trainer.data.documents import WindowForm
from trainer.data.indexed_file import open_indexed_file, write_indexed_file
from trainer.data.token_file import TokenFile, open_token_file, write_token_file


def token_file(*tokens: int, dtype: type = np.uint16, name: str = "a.bin") -> TokenFile:
    return tokens_in_memory(np.array(tokens, dtype=dtype), name=name)


def test_windows_overlap_by_one_token_and_drop_a_partial_one() -> None:
    samples = Samples([token_file(*range(10))], seq_length=4)
    assert samples.count == 2
    windows = samples.windows(np.array([1, 0, 1]))
    assert windows.dtype == np.int64
    assert windows.tolist() == [[4, 5, 6, 7, 8], [0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6), seq_length=st.integers(1, 12))
def test_windows_never_cross_files_and_use_each_target_once(sizes: list[int], seq_length: int) -> None:
    files, expected = [], []
    for number, size in enumerate(sizes):
        tokens = [number * 1000 + position for position in range(size)]
        files.append(token_file(*tokens, dtype=(np.uint16, np.uint32)[number % 2]))
        starts = range(0, size - seq_length, seq_length)
        expected += [tokens[start : start + seq_length + 1] for start in starts]
    if not expected:
        with pytest.raises(DataError, match=f"{seq_length + 1} tokens"):
            Samples(files, seq_length=seq_length)
        return
    samples = Samples(files, seq_length=seq_length)
    assert samples.count == len(expected)
    assert samples.windows(np.arange(samples.count)).tolist() == expected


@pytest.mark.parametrize("ids", [[-1], [2], [0, 1, 2], [2**40]])
def test_a_sample_out_of_range_is_refused(ids: list[int]) -> None:
    samples = Samples([token_file(*range(10))], seq_length=4)
    with pytest.raises(IndexError, match=r"range\(2\)"):
        samples.windows(np.array(ids))


def test_no_samples_asked_for_gives_no_rows() -> None:
    samples = Samples([token_file(*range(10))], seq_length=4)
    assert samples.windows(np.empty(0, dtype=np.int64)).shape == (0, 5)


def test_data_without_a_sample_is_refused_with_the_tokens_needed() -> None:
    files = [token_file(1, 2, 3, name="x.bin"), token_file(*range(8), name="y.bin")]
    with pytest.raises(DataError, match=r"x\.bin, y\.bin.*at least 9 tokens.*at most 8 tokens"):
        Samples(files, seq_length=8)
    with pytest.raises(DataError, match="no files"):
        Samples([], seq_length=8)


@pytest.mark.parametrize("per_document", [False, True])
def test_files_that_give_no_sample_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, per_document: bool
) -> None:
    sizes = {"long": 40, "exact": 9, "short": 1, "empty": 0}
    for name, size in sizes.items():
        write_indexed_file(tmp_path / f"{name}.bin", [np.arange(size)], dtype=np.dtype(np.uint16), end_of_text=99)
    files = [open_indexed_file(tmp_path / f"{name}.bin") for name in sizes]
    Samples(files[:2], seq_length=8, per_document=per_document)
    assert not caplog.text
    Samples(files, seq_length=8, per_document=per_document)
    assert "2 of 4 files give no sample" in caplog.text
    assert f"{tmp_path}/short.bin, {tmp_path}/empty.bin" in caplog.text
    assert f"{tmp_path}/exact.bin" not in caplog.text


def test_windows_read_from_a_file_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_token_file(path, [np.arange(100_000)], dtype=np.uint32)
    samples = Samples([open_token_file(path)], seq_length=1000)
    assert samples.count == 99
    assert samples.windows(np.array([98]))[0].tolist() == list(range(98_000, 99_001))


factors = st.integers(1, 6)


@given(consumed=st.integers(0, 10**12), count=factors, size=factors)
def test_an_iteration_reads_each_position_once(consumed: int, count: int, size: int) -> None:
    batches = [micro_batch_positions(consumed, number=number, micro_batch_size=size) for number in range(count)]
    assert [position for batch in batches for position in batch] == list(range(consumed, consumed + count * size))


@pytest.mark.parametrize(("consumed", "number", "micro_batch_size"), [(-1, 0, 1), (0, -1, 1), (0, 0, 0)])
def test_impossible_micro_batches_are_refused(consumed: int, number: int, micro_batch_size: int) -> None:
    with pytest.raises(ValueError, match="impossible micro batch"):
        micro_batch_positions(consumed, number=number, micro_batch_size=micro_batch_size)


@examples(60)
@given(files=st.lists(st.lists(st.integers(0, 20), max_size=6), min_size=1, max_size=3), seq_length=st.integers(1, 7))
def test_windows_of_documents_cover_each_target_once(files: list[list[int]], seq_length: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        opened, expected = [], []
        for number, sizes in enumerate(files):
            # The last token of a document is its end of text, so sizes of 0 leave that alone.
            documents = [np.append(np.arange(size) + 100 * number + 10, 9) for size in sizes]
            write_indexed_file(Path(folder, f"{number}.bin"), documents, dtype=np.dtype(np.uint16), end_of_text=9)
            opened.append(open_indexed_file(Path(folder, f"{number}.bin")))
            for document in documents:
                for start in range(0, len(document) - 1, seq_length):
                    expected.append(document[start : start + seq_length + 1].tolist())
        if not expected:
            with pytest.raises(DataError, match=r"a document of at least 2 tokens, found at most (0 tokens|1 token)\."):
                Samples(opened, seq_length=seq_length, per_document=True)
            return
        samples = Samples(opened, seq_length=seq_length, per_document=True)
        windows = torch.from_numpy(samples.windows(np.arange(samples.count)))
    inputs = WindowForm(is_padded=True).split(windows)
    for window, tokens, targets in zip(expected, inputs.tokens.tolist(), inputs.targets.tolist(), strict=True):
        rest = seq_length - (len(window) - 1)
        assert targets == window[1:] + [-100] * rest
        assert tokens[: len(window)] == (window if rest else window[:-1])
