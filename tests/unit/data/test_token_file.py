"""Token files: what is written is read, and what is not whole or not of the format is refused by name."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.errors import DataError
from tests.fakes import tokens_in_memory
from tests.profiles import examples
from trainer.data.fingerprint import check_tokens, fingerprint, scan
from trainer.data.token_file import (
    TokenArray,
    TokenFile,
    open_token_file,
    open_token_files,
    write_token_file,
)


def write(path: Path, *tokens: int, dtype: type = np.uint16) -> Path:
    write_token_file(path, [np.array(tokens, dtype=np.int64)], dtype=dtype)
    return path


def opened(path: Path, *tokens: int, dtype: type = np.uint16) -> TokenFile:
    return open_token_file(write(path, *tokens, dtype=dtype))


def of(files: Sequence[TokenFile]) -> str:
    return fingerprint([scan(file) for file in files])


@pytest.mark.parametrize(("dtype", "magic", "version"), [(np.uint16, 20240520, 1), (np.uint32, 20240801, 7)])
def test_a_file_has_the_bytes_of_llm_c(tmp_path: Path, dtype: type, magic: int, version: int) -> None:
    path = write(tmp_path / "a.bin", 1, 2, 65535, dtype=dtype)
    header = np.zeros(256, dtype="<i4")
    header[:3] = [magic, version, 3]
    body = np.array([1, 2, 65535], dtype=np.dtype(dtype).newbyteorder("<"))
    assert path.read_bytes() == header.tobytes() + body.tobytes()


@examples(50)
@given(chunks=st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=40), max_size=6))
def test_tokens_come_back_in_order(tmp_path_factory: pytest.TempPathFactory, chunks: list[list[int]]) -> None:
    path = tmp_path_factory.mktemp("tokens") / "a.bin"
    for dtype in (np.uint16, np.uint32):
        write_token_file(path, (np.array(chunk, dtype=np.int32) for chunk in chunks), dtype=dtype)
        file = open_token_file(path)
        assert file.dtype == dtype
        assert file.read().tolist() == [token for chunk in chunks for token in chunk]


@given(start=st.integers(0, 9), stop=st.integers(0, 9))
def test_a_part_of_the_tokens_is_read(start: int, stop: int) -> None:
    file = tokens_in_memory(np.arange(9, dtype=np.uint16))
    if start > stop:
        with pytest.raises(IndexError, match=r"range\(9\)"):
            file.read(start, stop)
    else:
        assert file.read(start, stop).tolist() == list(range(start, stop))
    with pytest.raises(IndexError):
        file.read(start, 10)


@pytest.mark.parametrize("left_bytes", [0, 500, 1024, 1030, 1043])
def test_a_file_truncated_while_open_is_named_with_both_sizes(tmp_path: Path, left_bytes: int) -> None:
    path = write(tmp_path / "a.bin", *range(10))
    file = open_token_file(path)
    os.truncate(path, left_bytes)
    with pytest.raises(DataError, match=rf"cut.*a\.bin.*1044 bytes.*found {left_bytes} bytes"):
        file.read()
    whole = max(0, left_bytes - 1024) // 2
    assert file.read(0, whole).tolist() == list(range(whole))


def test_a_file_that_is_replaced_is_read_on_as_it_was(tmp_path: Path) -> None:
    file = opened(tmp_path / "a.bin", 1, 2)
    write(tmp_path / "a.bin", 3)
    assert file.read().tolist() == [1, 2]


def test_more_files_than_a_process_may_open_are_read(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{number}.bin", number) for number in range(80)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 10, limits[1]))
    try:
        with pytest.raises(DataError, match=r"Too many open files.*ulimit"):
            _ = [open_token_file(path) for path in paths]
        files = open_token_files(paths)
        assert [int(file.read()[0]) for file in files] == list(range(80))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1000  # a save must still find some
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_file_is_closed_when_nobody_has_it(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    file = opened(tmp_path / "a.bin", 1, 2)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del file
    with pytest.raises(DataError):
        open_token_file(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.bin.*No such file"):
        open_token_file(tmp_path / "nowhere.bin")


def test_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="directory"):
        open_token_file(tmp_path)


@pytest.mark.parametrize("size_bytes", [0, 1, 1023])
def test_a_file_shorter_than_a_header_is_refused(tmp_path: Path, size_bytes: int) -> None:
    path = tmp_path / "short.bin"
    path.write_bytes(bytes(size_bytes))
    with pytest.raises(DataError, match=rf"short\.bin.*1024 bytes.*{size_bytes} bytes"):
        open_token_file(path)


@pytest.mark.parametrize("header", [(7, 1), (20240520, 2), (20240520, 7), (20240801, 1), (20240801, 8), (0, 0)])
def test_another_magic_or_version_is_refused(tmp_path: Path, header: tuple[int, int]) -> None:
    path = write(tmp_path / "a.bin", 1, 2, 3)
    raw = bytearray(path.read_bytes())
    raw[:8] = np.array(header, dtype="<i4").tobytes()
    path.write_bytes(raw)
    with pytest.raises(DataError, match=rf"a\.bin.*20240520.*magic {header[0]} version {header[1]}"):
        open_token_file(path)


@pytest.mark.parametrize(
    ("change_bytes", "found"),
    [
        (-6, "0 tokens"),
        (-4, "1 token"),
        (-2, "2 tokens"),
        (-1, "2 tokens and 1 odd byte"),
        (1, "3 tokens and 1 odd byte"),
        (2, "4 tokens"),
        (1000, "503 tokens"),
    ],
)
def test_a_size_that_is_not_the_header_s_is_refused(tmp_path: Path, change_bytes: int, found: str) -> None:
    path = write(tmp_path / "a.bin", 1, 2, 3)
    raw = path.read_bytes()
    path.write_bytes(raw[:change_bytes] if change_bytes < 0 else raw + bytes(change_bytes))
    with pytest.raises(DataError, match=rf"a\.bin.*3 tokens of 2 bytes, found {found}\."):
        open_token_file(path)


@pytest.mark.parametrize("claimed", [-1, -(2**31), 2**31 - 1])
def test_an_impossible_count_is_refused(tmp_path: Path, claimed: int) -> None:
    path = write(tmp_path / "a.bin", 1, 2, 3)
    raw = bytearray(path.read_bytes())
    raw[8:12] = np.array([claimed], dtype="<i4").tobytes()
    path.write_bytes(raw)
    with pytest.raises(DataError, match=str(claimed)):
        open_token_file(path)


@pytest.mark.parametrize("tokens", [[65536], [-1], [2**40]])
def test_a_token_that_does_not_fit_is_refused(tmp_path: Path, tokens: list[int]) -> None:
    with pytest.raises(DataError, match=rf"a\.bin.*{tokens[0]}"):
        write(tmp_path / "a.bin", 3, *tokens)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("chunk", [np.zeros(3), np.zeros((2, 2), dtype=np.int64), np.zeros(2, dtype=bool)])
def test_chunks_that_are_no_tokens_are_refused(tmp_path: Path, chunk: np.ndarray) -> None:
    with pytest.raises(ValueError, match="1-D arrays of integers"):
        write_token_file(tmp_path / "a.bin", [chunk], dtype=np.uint16)


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="int64"):
        write_token_file(tmp_path / "a.bin", [], dtype=np.int64)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", 1, 2, 3)
    before = path.read_bytes()

    def broken() -> Iterator[TokenArray]:
        yield np.arange(100)
        raise RuntimeError("source is gone")

    with pytest.raises(RuntimeError, match="source is gone"):
        write_token_file(path, broken(), dtype=np.uint16)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none/a\.bin"):
        write(tmp_path / "none" / "a.bin", 1)


def test_a_token_outside_the_vocabulary_is_refused_by_position(tmp_path: Path) -> None:
    tokens = np.zeros(5 * 2**20, dtype=np.uint16)
    tokens[[4 * 2**20 + 17, 4 * 2**20 + 18]] = 300, 400
    path = tmp_path / "a.bin"
    write_token_file(path, [tokens], dtype=np.uint16)
    file = open_token_file(path)
    message = rf"a\.bin, position {4 * 2**20 + 17}.*0 to 299.*found 300"
    with pytest.raises(DataError, match=message):
        check_tokens(file, 300)
    check_tokens(file, 401)
    assert scan(file).largest == 400


def test_the_fingerprint_does_not_depend_on_paths(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first = [opened(tmp_path / "a.bin", 1, 2), opened(tmp_path / "b.bin", 3)]
    second = [opened(tmp_path / "other" / "z.bin", 1, 2), opened(tmp_path / "other" / "y.bin", 3)]
    assert of(first) == of(second)


def test_the_fingerprint_depends_on_content_order_cuts_dtype(tmp_path: Path) -> None:
    a, b = opened(tmp_path / "a.bin", 1, 2), opened(tmp_path / "b.bin", 3)
    variants = [
        [a, b],
        [b, a],
        [a],
        [a, b, b],
        [],
        [opened(tmp_path / "c.bin", 1), opened(tmp_path / "d.bin", 2, 3)],
        [opened(tmp_path / "e.bin", 1, 2, 3)],
        [opened(tmp_path / "f.bin", 1, 2, dtype=np.uint32), b],
        [opened(tmp_path / "g.bin", 1, 4), b],
        [opened(tmp_path / "h.bin"), a, b],
    ]
    assert len({of(files) for files in variants}) == len(variants)


def test_the_fingerprint_is_the_same_in_every_version(tmp_path: Path) -> None:
    files = [opened(tmp_path / "a.bin", 1, 2), opened(tmp_path / "b.bin", 3, dtype=np.uint32)]
    assert of(files) == "849f24cdd9f13834"
