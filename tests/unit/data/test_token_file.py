"""Token files: what is written is read, and what is not whole or not of the format is refused by name."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reprise.errors import DataError
from tests.fakes import open_files
from tests.messages import refused
from tests.profiles import examples
from trainer.data.data_file import TokenArray
from trainer.data.fingerprint import fingerprint, scan
from trainer.data.indexed_file import open_indexed_file, write_indexed_file
from trainer.data.token_file import TokenFile, open_token_file, open_token_files, write_token_file


def write(path: Path, *tokens: int, dtype: type = np.uint16) -> Path:
    write_token_file(path, [np.array(tokens, dtype=np.int64)], dtype=dtype)
    return path


def opened(path: Path, *tokens: int, dtype: type = np.uint16) -> TokenFile:
    return open_token_file(write(path, *tokens, dtype=dtype))


# Each writer and reader of tokens, with the end of text of the format that needs one.
FORMS: dict[str, tuple[Callable[..., None], Callable[[Path], TokenFile]]] = {
    "token files": (write_token_file, open_token_file),
    "Megatron's": (partial(write_indexed_file, end_of_text=9), open_indexed_file),
}


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
@given(
    chunks=st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=40), min_size=1, max_size=6),
    form=st.sampled_from([*FORMS]),
    cut=st.tuples(st.integers(0, 250), st.integers(0, 250)),
    left=st.integers(0, 500),
)
@example(chunks=[[5]], form="Megatron's", cut=(0, 1), left=0)
def test_tokens_come_back_in_every_format(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[list[int]], form: str, cut: tuple[int, int], left: int
) -> None:
    path, (write_form, open_form) = tmp_path_factory.mktemp("tokens") / "a.bin", FORMS[form]
    tokens = [token for chunk in chunks for token in chunk]
    for dtype in (np.uint16, np.uint32):
        write_form(path, (np.array(chunk, dtype=np.int64) for chunk in chunks), dtype=dtype)
        file = open_form(path)
        assert (file.dtype, file.count) == (dtype, len(tokens))
        assert file.read().tolist() == tokens
        start, stop = sorted(min(end, len(tokens)) for end in cut)
        assert file.read(start, stop).tolist() == tokens[start:stop]
        for bad in ((start, len(tokens) + 1), (stop + 1, stop), (-1, 0)):
            with pytest.raises(IndexError, match="expected tokens in range"):
                file.read(*bad)
        os.truncate(path, max(0, path.stat().st_size - left - 1))
        if tokens:
            with pytest.raises(DataError, match=r"a\.bin\), expected \d+ bytes, found \d+ bytes"):
                file.read()


def test_more_files_than_a_process_may_open_are_read(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{number}.bin", number) for number in range(80)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 10, limits[1]))
    try:
        with pytest.raises(DataError, match="ulimit"):
            _ = [open_token_file(path) for path in paths]
        files = open_token_files(paths)
        assert [int(file.read()[0]) for file in files] == list(range(80))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1000  # a save must still find some
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_file_is_closed_when_nobody_has_it(tmp_path: Path) -> None:
    before = len(open_files())
    file = opened(tmp_path / "a.bin", 1, 2)
    assert len(open_files()) == before + 1
    del file
    for path in (tmp_path, tmp_path / "nowhere.bin"):
        with refused(DataError, str(path)):
            open_token_file(path)
    assert len(open_files()) == before


@pytest.mark.parametrize(
    ("magic", "version", "count", "body_bytes", "word"),
    [
        *(
            (*header, 3, 6, "unknown header")
            for header in [(7, 1), (20240520, 7), (20240801, 1), (20240801, 8), (0, 0)]
        ),
        (20240520, 1, 3, 0, "3 tokens of 2 bytes, found 1024 bytes"),
        (20240520, 1, 3, 4, "found 1028 bytes"),
        (20240520, 1, 3, 5, "found 1029 bytes"),
        (20240520, 1, 3, 8, "found 1032 bytes"),
        (20240520, 1, -1, 6, "-1"),
        (20240520, 1, 2**31 - 1, 6, f"{2**31 - 1}"),
        (20240520, 1, 0, -1, "1023 bytes"),
        (20240520, 1, 0, -1024, "0 bytes"),
    ],
)
def test_a_damaged_file_is_refused_by_name(
    tmp_path: Path, magic: int, version: int, count: int, body_bytes: int, word: str
) -> None:
    content = np.array([magic, version, count], dtype="<i4").tobytes() + bytes(1012 + max(0, body_bytes))
    (tmp_path / "a.bin").write_bytes(content[: 1024 + body_bytes])
    with refused(DataError, "a.bin", word):
        open_token_file(tmp_path / "a.bin")


@pytest.mark.parametrize("form", FORMS)
def test_chunks_that_do_not_fit_are_refused_and_leave_nothing(tmp_path: Path, form: str) -> None:
    write_form, _ = FORMS[form]
    for token in (65536, -1, 2**40):
        with refused(DataError, "a.bin", f"{token}"):
            write_form(tmp_path / "a.bin", [np.array([3]), np.array([4, token])], dtype=np.uint16)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", 1, 2, 3)
    file, before = open_token_file(path), path.read_bytes()

    def broken() -> Iterator[TokenArray]:
        yield np.arange(100)
        raise RuntimeError("source is gone")

    with pytest.raises(RuntimeError, match="source is gone"):
        write_token_file(path, broken(), dtype=np.uint16)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with refused(DataError, "a.bin/b.bin"):
        write(path / "b.bin", 1)
    write(path, 3)
    assert file.read().tolist() == [1, 2, 3], "as it was when it was opened"


def test_the_largest_token_of_many_is_known(tmp_path: Path) -> None:
    tokens = np.zeros(5 * 2**20, dtype=np.uint16)
    for position in (0, 4 * 2**20 + 17, -1):
        tokens[position] += 300
        write_token_file(tmp_path / "a.bin", [tokens], dtype=np.uint16)
        assert scan(open_token_file(tmp_path / "a.bin")).largest == 300
        tokens[position] = 0


def test_the_fingerprint_depends_on_content_order_cuts_dtype(tmp_path: Path) -> None:
    prints = {of([])}
    variants = ("12,3", "3,12", "12", "12,3,3", "1,23", "123", "14,3", ",12,3")  # tokens of one digit, file by file
    for variant in variants:
        for dtype in (np.uint16, np.uint32):
            files = enumerate(variant.split(","))
            prints.add(of([opened(tmp_path / f"{n}.bin", *map(int, tokens), dtype=dtype) for n, tokens in files]))
    assert len(prints) == 1 + 2 * len(variants)


def test_the_fingerprint_is_the_same_in_every_version(tmp_path: Path) -> None:
    files = [opened(tmp_path / "a.bin", 1, 2), opened(tmp_path / "b.bin", 3, dtype=np.uint32)]
    assert of(files) == "849f24cdd9f13834"
