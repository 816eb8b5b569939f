"""datatrove's files: the format byte by byte, and refusals of files that do not fit together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from reprise.errors import DataError
from trainer.data.batches import Samples
from trainer.data.datatrove_file import open_datatrove_file
from trainer.data.documents import BEGINS, DocumentMarks
from trainer.data.indexed_file import open_indexed_file, write_indexed_file
from trainer.data.token_file import open_token_file

DOCUMENTS = [[1, 2, 9], [], [3, 9], [4]]
TOKENS = [token for document in DOCUMENTS for token in document]


def by_hand(folder: Path, documents: list[list[int]], *, token_bytes: int = 2, describes: bool = True) -> Path:
    """Write the files as datatrove's `TokenizedFile` does."""
    path = folder / "00000_tokens.ds"
    tokens = [token for document in documents for token in document]
    path.write_bytes(np.array(tokens, f"<u{token_bytes}").tobytes())
    ends = np.cumsum([len(document) for document in documents], dtype=np.uint64)
    Path(f"{path}.index").write_bytes(ends.astype("<u8").tobytes())
    if describes:
        Path(f"{path}.metadata").write_text(f"a|b/tokenizer.json|{token_bytes}\n{len(tokens)}\n{len(tokens)} T")
    return path


@pytest.mark.parametrize("describes", [True, False])
@pytest.mark.parametrize("token_bytes", [2, 4])
def test_tokens_and_documents_are_read(tmp_path: Path, token_bytes: int, describes: bool) -> None:
    file = open_datatrove_file(by_hand(tmp_path, DOCUMENTS, token_bytes=token_bytes, describes=describes))
    assert file.dtype == np.dtype(f"<u{token_bytes}")
    assert file.read().tolist() == TOKENS
    assert file.read(2, 4).tolist() == [9, 3]
    assert file.documents is not None
    assert file.documents.borders().tolist() == [0, 3, 3, 5, 6]
    assert file.documents.begins(0, 6) == [0, 3, 5]
    assert file.documents.begins(1, 5) == [3]


def test_a_file_of_a_task_without_documents_is_read(tmp_path: Path) -> None:
    file = open_datatrove_file(by_hand(tmp_path, []))
    assert file.count == 0
    assert file.documents is not None
    assert file.documents.borders().tolist() == [0]


def test_windows_keep_the_documents_of_the_index(tmp_path: Path) -> None:
    file = open_datatrove_file(by_hand(tmp_path, DOCUMENTS))
    windows = Samples([file], seq_length=5, marks=DocumentMarks(None)).windows(np.arange(1))
    assert np.flatnonzero(windows[0] >= BEGINS).tolist() == [0, 3, 5]
    assert Samples([file], seq_length=2, per_document=True).windows(np.arange(2))[:, 0].tolist() == [1, 3]


def test_samples_are_those_of_megatron_with_the_same_documents(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 10, 500)
    ends = np.flatnonzero(tokens == 9) + 1
    documents = [part.tolist() for part in np.split(tokens, ends)]
    write_indexed_file(tmp_path / "a.bin", [tokens], dtype=np.dtype(np.uint16), end_of_text=9)
    files = [open_indexed_file(tmp_path / "a.bin"), open_datatrove_file(by_hand(tmp_path, documents))]
    for per_document in (False, True):
        expected, actual = (
            Samples([file], seq_length=7, marks=DocumentMarks(None), per_document=per_document) for file in files
        )
        assert np.array_equal(actual.windows(np.arange(actual.count)), expected.windows(np.arange(expected.count)))


def index_of(path: Path, *ends: int) -> None:
    Path(f"{path}.index").write_bytes(np.array(ends, "<u8").tobytes())


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: path.unlink(), "No such file"),
    (lambda path: path.write_bytes(path.read_bytes()[:6]), "expected 6 tokens of 2 bytes.*found 6 bytes"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), "found 11 bytes"),
    (lambda path: Path(f"{path}.index").unlink(), r"no index beside it.*00000_tokens\.ds\.index"),
    (lambda path: Path(f"{path}.index").write_bytes(b"123"), "8 bytes for each document, found 3 bytes"),
    (lambda path: index_of(path, 3, 7), "expected 7 tokens of 2 bytes"),
    (lambda path: index_of(path, 2**64 - 1), "expected -1 tokens"),
    (lambda path: index_of(path, 2**63 + 6), "found 12 bytes"),
    (lambda path: index_of(path), "expected 0 tokens"),
    (lambda path: Path(f"{path}.metadata").write_text("tokenizer|4\n6\n6 T"), "expected 6 tokens of 4 bytes"),
    (lambda path: Path(f"{path}.metadata").write_text("tokenizer|3\n6\n6 T"), "description.*damaged.*found b'3'"),
    (lambda path: Path(f"{path}.metadata").write_bytes(bytes(1 << 20)), "larger than"),
    (lambda path: Path(f"{path}.loss").write_bytes(bytes(6)), "Loss masks lie beside"),
    (lambda path: (Path(f"{path}.index").unlink(), os.mkfifo(f"{path}.index")), "cannot be read"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    path = by_hand(tmp_path, DOCUMENTS)
    damage(path)
    with pytest.raises(DataError, match=message):
        open_datatrove_file(path)


@pytest.mark.parametrize("ends", [(5, 3, 6), (7, 6), (2**63, 6), (2**64 - 1, 6)])
def test_an_index_that_does_not_increase_is_refused(tmp_path: Path, ends: tuple[int, ...]) -> None:
    path = by_hand(tmp_path, DOCUMENTS)
    index_of(path, *ends)
    documents = open_datatrove_file(path).documents
    assert documents is not None
    with pytest.raises(DataError, match="index of documents is damaged"):
        documents.borders()
    with pytest.raises(DataError, match="index of documents is damaged"):
        documents.begins(0, 6)


def test_half_of_a_file_of_wide_tokens_is_no_file_of_narrow_ones(tmp_path: Path) -> None:
    path = by_hand(tmp_path, DOCUMENTS, token_bytes=4)
    path.write_bytes(path.read_bytes()[:12])
    with pytest.raises(DataError, match="expected 6 tokens of 4 bytes"):
        open_datatrove_file(path)


def test_a_reader_of_token_files_names_the_kind_of_these(tmp_path: Path) -> None:
    path = by_hand(tmp_path, [list(range(1024))])
    with pytest.raises(DataError, match="data=datatrove"):
        open_token_file(path)
