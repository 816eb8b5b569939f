"""datatrove's files: the format byte by byte, and refusals of files that do not fit together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from reprise.errors import DataError
from tests.messages import refused
from trainer.data.batches import Samples
from trainer.data.datatrove_file import open_datatrove_file
from trainer.data.document_table import table_of
from trainer.data.documents import DocumentMarks
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
    empty = open_datatrove_file(by_hand(tmp_path, []))
    assert empty.documents is not None
    assert (empty.count, empty.documents.borders().tolist()) == (0, [0])


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
    (lambda path: path.unlink(), "00000_tokens.ds"),
    (lambda path: path.write_bytes(path.read_bytes()[:6]), "found 6 bytes"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), "found 11 bytes"),
    (lambda path: Path(f"{path}.index").unlink(), "00000_tokens.ds.index"),
    (lambda path: Path(f"{path}.index").write_bytes(b"123"), "found 3 bytes"),
    (lambda path: index_of(path, 3, 7), "7 tokens of 2 bytes"),
    (lambda path: index_of(path, 2**64 - 1), "-1 tokens"),
    (lambda path: index_of(path, 2**63 + 6), "found 12 bytes"),
    (lambda path: index_of(path), "0 tokens"),
    (lambda path: Path(f"{path}.metadata").write_text("tokenizer|4\n6\n6 T"), "6 tokens of 4 bytes"),
    (lambda path: Path(f"{path}.metadata").write_text("tokenizer|3\n6\n6 T"), "b'3'"),
    (lambda path: Path(f"{path}.metadata").write_bytes(bytes(1 << 20)), ".metadata"),
    (lambda path: Path(f"{path}.loss").write_bytes(bytes(6)), ".loss"),
    (lambda path: (Path(f"{path}.index").unlink(), os.mkfifo(f"{path}.index")), ".index"),
]


@pytest.mark.parametrize(("damage", "word"), DAMAGE, ids=range(len(DAMAGE)))
def test_files_that_do_not_fit_are_refused(tmp_path: Path, damage: Callable[[Path], object], word: str) -> None:
    path = by_hand(tmp_path, DOCUMENTS)
    damage(path)
    with refused(DataError, word):
        open_datatrove_file(path)


@pytest.mark.parametrize("ends", [(5, 3, 6), (7, 6), (2**63, 6), (2**64 - 1, 6)])
def test_an_index_that_does_not_increase_is_refused(tmp_path: Path, ends: tuple[int, ...]) -> None:
    path = by_hand(tmp_path, DOCUMENTS)
    index_of(path, *ends)
    with refused(DataError, ".index"):
        table_of(open_datatrove_file(path), seq_length=7, cache=None)


def test_a_reader_of_token_files_names_the_kind_of_these(tmp_path: Path) -> None:
    with refused(DataError, "data=datatrove"):
        open_token_file(by_hand(tmp_path, [list(range(1024))]))
