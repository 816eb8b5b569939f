"""Megatron's data files: the format byte by byte, and refusals of files that do not fit together."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from reprise.errors import DataError
from trainer.data.indexed_file import find_indexed, open_indexed_file, write_indexed_file

END = 9


def by_hand(path: Path, sequences: list[list[int]], *, code: int = 8, version: int = 1, modes: bytes = b"") -> Path:
    """Write both files as Megatron-Core's `IndexedDatasetBuilder` does, each sequence a document."""
    dtype = {8: "<u2", 4: "<i4", 5: "<i8"}[code]
    arrays = [np.array(sequence, dtype) for sequence in sequences]
    path.write_bytes(b"".join(array.tobytes() for array in arrays))
    lengths = np.array([array.size for array in arrays], "<i4")
    offsets = np.array([sum(array.nbytes for array in arrays[:n]) for n in range(len(arrays))], "<i8")
    borders = np.arange(len(arrays) + 1, dtype="<i8")
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", version, code, len(arrays), len(borders))
    index = header + lengths.tobytes() + offsets.tobytes() + borders.tobytes() + modes
    path.with_suffix(".idx").write_bytes(index)
    return path


@pytest.mark.parametrize("code", [8, 4])
def test_tokens_are_read_over_borders_of_documents(tmp_path: Path, code: int) -> None:
    file = open_indexed_file(by_hand(tmp_path / "a.bin", [[1, 2, END], [3, END], [4]], code=code))
    assert file.read().tolist() == [1, 2, END, 3, END, 4]
    assert file.read(2, 5).tolist() == [END, 3, END]
    assert file.nbytes == file.count * file.dtype.itemsize


def test_a_multimodal_index_is_read(tmp_path: Path) -> None:
    assert open_indexed_file(by_hand(tmp_path / "a.bin", [[1], [2, 3]], modes=b"\0\1")).count == 3


def test_a_file_without_tokens_is_read(tmp_path: Path) -> None:
    assert open_indexed_file(by_hand(tmp_path / "a.bin", [])).count == 0


@pytest.mark.parametrize(("dtype", "code"), [(np.uint16, 8), (np.uint32, 4)])
def test_both_files_have_the_bytes_of_megatron(tmp_path: Path, dtype: type, code: int) -> None:
    chunks = [np.array(chunk) for chunk in ([1, 2], [3, END, END, 4], [], [5, END], [6])]
    write_indexed_file(tmp_path / "ours.bin", chunks, dtype=np.dtype(dtype), end_of_text=END)
    by_hand(tmp_path / "theirs.bin", [[1, 2, 3, END], [END], [4, 5, END], [6]], code=code)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


@pytest.mark.parametrize(("token", "dtype"), [(2**31, np.uint32), (65536, np.uint16), (-1, np.uint32)])
def test_a_token_that_does_not_fit_is_refused(tmp_path: Path, token: int, dtype: type) -> None:
    with pytest.raises(DataError, match="a token does not fit its file"):
        write_indexed_file(tmp_path / "a.bin", [np.array([token])], dtype=np.dtype(dtype), end_of_text=END)
    assert not list(tmp_path.iterdir())


def cut(path: Path, at: int) -> None:
    path.write_bytes(path.read_bytes()[:at])


def change(path: Path, at: int, data: bytes) -> None:
    old = path.read_bytes()
    path.write_bytes(old[:at] + data + old[at + len(data) :])


DAMAGE: list[tuple[Callable[[Path, Path], object], str]] = [
    (lambda tokens, index: index.unlink(), r"a\.idx\).*No such file"),
    (lambda tokens, index: tokens.unlink(), r"a\.bin\).*No such file"),
    (lambda tokens, index: cut(tokens, 8), "expected 10 bytes, by a.idx, found 8 bytes"),
    (lambda tokens, index: cut(index, 20), "is no index of Megatron's data"),
    (lambda tokens, index: cut(index, 40), "size of an index differs from its header"),
    (lambda tokens, index: change(index, 0, b"TNTIDX"), "is no index of Megatron's data"),
    (lambda tokens, index: change(index, 9, b"\2"), r"version 1, and uint16 \(8\) or int32 \(4\), found version 2"),
    (lambda tokens, index: change(index, 17, b"\7"), r"found version 1, and float32 \(7\)"),
    (lambda tokens, index: change(index, 17, b"\4"), "expected 14 bytes, by a.idx, found 10 bytes"),
    (lambda tokens, index: change(index, 42, b"\1"), "is damaged"),
    (lambda tokens, index: change(index, 74, b"\7"), "is damaged"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_files_that_do_not_fit_are_refused(
    tmp_path: Path, damage: Callable[[Path, Path], object], message: str
) -> None:
    path = by_hand(tmp_path / "a.bin", [[1, 2, END], [3, END]])
    damage(path, path.with_suffix(".idx"))
    with pytest.raises(DataError, match=message):
        open_indexed_file(path)


def test_a_prefix_a_path_and_a_glob_name_files(tmp_path: Path) -> None:
    paths = [by_hand(tmp_path / f"{name}.bin", [[1]]) for name in ("a_text_document", "b")]
    assert find_indexed(str(tmp_path / "a_text_document")) == paths[:1]
    assert find_indexed(str(paths[1])) == paths[1:]
    assert find_indexed(f"{tmp_path}/*.bin") == paths
    with pytest.raises(DataError, match=r"another name.*PREFIX\.bin"):
        find_indexed(f"{tmp_path}/*")
    with pytest.raises(DataError, match="no file matches"):
        find_indexed(str(tmp_path / "c"))
