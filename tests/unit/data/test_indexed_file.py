"""Megatron's data files: the format byte by byte, and refusals of files that do not fit together."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from reprise.errors import DataError
from tests.messages import refused
from trainer.data.document_table import table_of
from trainer.data.indexed_file import find_indexed, open_indexed_file, write_indexed_file

END = 9


def by_hand(
    path: Path,
    sequences: Sequence[object],
    *,
    code: int = 8,
    modes: bytes = b"",
    document_sequences: int = 1,
) -> Path:
    """Write both files as Megatron-Core's `IndexedDatasetBuilder` does, with so many sequences in each document."""
    arrays = [np.array(sequence, {8: "<u2", 4: "<i4", 5: "<i8"}[code]) for sequence in sequences]
    path.write_bytes(b"".join(array.tobytes() for array in arrays))
    lengths = np.array([array.size for array in arrays], "<i4")
    ends = np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8")
    borders = np.arange(0, len(arrays) + 1, document_sequences, dtype="<i8")
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(arrays), len(borders))
    index = header + lengths.tobytes() + ends[:-1].tobytes() + borders.tobytes() + modes
    path.with_suffix(".idx").write_bytes(index)
    return path


def test_a_file_may_be_empty_but_not_multimodal(tmp_path: Path) -> None:
    with refused(DataError, "multimodal.idx"):
        open_indexed_file(by_hand(tmp_path / "multimodal.bin", [[1], [2, 3]], modes=b"\0\1"))
    assert open_indexed_file(by_hand(tmp_path / "empty.bin", [])).count == 0


@pytest.mark.parametrize(("dtype", "code"), [(np.uint16, 8), (np.uint32, 4)])
def test_both_files_have_the_bytes_of_megatron(tmp_path: Path, dtype: type, code: int) -> None:
    chunks = [np.array(chunk) for chunk in ([1, 2], [3, END, END, 4], [], [5, END], [6])]
    write_indexed_file(tmp_path / "ours.bin", chunks, dtype=np.dtype(dtype), end_of_text=END)
    by_hand(tmp_path / "theirs.bin", [[1, 2, 3, END], [END], [4, 5, END], [6]], code=code)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


def test_a_token_above_int32_is_refused(tmp_path: Path) -> None:
    with refused(DataError, "a.bin", f"{2**31}"):
        write_indexed_file(tmp_path / "a.bin", [np.array([2**31])], dtype=np.dtype(np.uint32), end_of_text=END)


def change(path: Path, at: int, data: bytes) -> None:
    old = path.read_bytes()
    path.write_bytes(old[:at] + data + old[at + len(data) :])


# What is changed in a file from an offset on; None ends the file there.
DAMAGE = [
    (".idx", 0, None, "a.idx"),
    (".bin", 8, None, "found 8 bytes"),
    (".idx", 20, None, "a.idx"),
    (".idx", 40, None, "a.idx"),
    (".idx", 0, b"TNTIDX", "a.idx"),
    (".idx", 9, b"\2", "version 2"),
    (".idx", 17, b"\7", "code 7"),
    (".idx", 17, b"\4", "expected 14 bytes"),
]


@pytest.mark.parametrize(("suffix", "at", "data", "word"), DAMAGE, ids=range(len(DAMAGE)))
def test_files_that_do_not_fit_are_refused(tmp_path: Path, suffix: str, at: int, data: bytes | None, word: str) -> None:
    path = by_hand(tmp_path / "a.bin", [[1, 2, END], [3, END]])
    if data is None:
        os.truncate(path.with_suffix(suffix), at)
    else:
        change(path.with_suffix(suffix), at, data)
    with refused(DataError, word):
        open_indexed_file(path)


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_a_file_that_is_gone_is_named(tmp_path: Path, suffix: str) -> None:
    path = by_hand(tmp_path / "a.bin", [[1]])
    path.with_suffix(suffix).unlink()
    with refused(DataError, f"a{suffix}"):
        open_indexed_file(path)


@pytest.mark.parametrize("offset", [b"\5", b"\xc8"])
def test_an_offset_of_no_token_is_refused_where_it_is_read(tmp_path: Path, offset: bytes) -> None:
    change(by_hand(tmp_path / "a.bin", [[1, 2], [3], [4]]).with_suffix(".idx"), 54, offset)
    file = open_indexed_file(tmp_path / "a.bin")
    with refused(DataError, "a.idx"):
        table_of(file, 7)


def test_a_prefix_a_path_and_a_glob_name_files(tmp_path: Path) -> None:
    paths = [by_hand(tmp_path / f"{name}.bin", [[1]]) for name in ("a_text_document", "b")]
    assert find_indexed(str(tmp_path / "a_text_document")) == paths[:1]
    assert find_indexed(str(paths[1])) == paths[1:]
    assert find_indexed(f"{tmp_path}/*.bin") == find_indexed(f"{tmp_path}/*") == paths
    with refused(DataError, f"{tmp_path}/c"):
        find_indexed(str(tmp_path / "c"))
