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
from tests.messages import refused
from tests.profiles import examples
from trainer.data.batches import Samples
from trainer.data.documents import WindowForm
from trainer.data.indexed_file import open_indexed_file, write_indexed_file
from trainer.data.token_file import TokenFile


def token_file(*tokens: int, dtype: type = np.uint16, name: str = "a.bin") -> TokenFile:
    return tokens_in_memory(np.array(tokens, dtype=dtype), name=name)


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
    for order in (slice(None), slice(None, None, -1), slice(0)):
        windows = samples.windows(np.arange(samples.count)[order])
        assert windows.dtype == np.int64
        assert windows.tolist() == expected[order]
    sources = [[file] for file in files if file.count > seq_length]
    samples = Samples(*sources, seq_length=seq_length)
    assert samples.windows(np.arange(samples.count)).tolist() == expected
    assert np.diff(samples.source_bounds).tolist() == [(file.count - 1) // seq_length for (file,) in sources]


@pytest.mark.parametrize("ids", [[-1], [2], [0, 1, 2], [2**40]])
def test_a_sample_out_of_range_is_refused(ids: list[int]) -> None:
    samples = Samples([token_file(*range(10))], seq_length=4)
    with pytest.raises(IndexError):
        samples.windows(np.array(ids))


def test_data_without_a_sample_is_refused_with_the_tokens_needed() -> None:
    files = [token_file(1, 2, 3, name="x.bin"), token_file(*range(8), name="y.bin")]
    with refused(DataError, "x.bin, y.bin", "9 tokens"):
        Samples(files, seq_length=8)
    with refused(DataError):
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


factors = st.integers(1, 6)


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
            with pytest.raises(DataError, match="2 tokens"):
                Samples(opened, seq_length=seq_length, per_document=True)
            return
        samples = Samples(opened, seq_length=seq_length, per_document=True)
        windows = torch.from_numpy(samples.windows(np.arange(samples.count)))
    inputs = WindowForm(is_padded=True).split(windows)
    for window, tokens, targets in zip(expected, inputs.tokens.tolist(), inputs.targets.tolist(), strict=True):
        rest = seq_length - (len(window) - 1)
        assert targets == window[1:] + [-100] * rest
        assert tokens[: len(window)] == (window if rest else window[:-1])
