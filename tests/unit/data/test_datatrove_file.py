"""datatrove's files: the format byte by byte, and refusals of files that do not fit together."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from reprise.errors import DataError
from tests.messages import refused
from trainer.data.datatrove_file import open_datatrove_file
from trainer.data.document_table import table_of

DOCUMENTS = [[1, 2, 9], [], [3, 9], [4]]
TOKENS = [token for document in DOCUMENTS for token in document]


def by_hand(folder: Path, documents: list[list[int]], *, token_bytes: int = 2) -> Path:
    """Write the files as datatrove's `TokenizedFile` does."""
    path = folder / "00000_tokens.ds"
    tokens = [token for document in documents for token in document]
    path.write_bytes(np.array(tokens, f"<u{token_bytes}").tobytes())
    ends = np.cumsum([len(document) for document in documents], dtype=np.uint64)
    Path(f"{path}.index").write_bytes(ends.astype("<u8").tobytes())
    return path


@pytest.mark.parametrize("token_bytes", [2, 4])
def test_tokens_and_documents_are_read(tmp_path: Path, token_bytes: int) -> None:
    file = open_datatrove_file(by_hand(tmp_path, DOCUMENTS, token_bytes=token_bytes))
    assert file.dtype == np.dtype(f"<u{token_bytes}")
    assert file.read().tolist() == TOKENS
    assert file.read(2, 4).tolist() == [9, 3]
    assert file.documents is not None
    assert file.documents.borders(0, 4).tolist() == [0, 3, 3, 5, 6]
    empty = open_datatrove_file(by_hand(tmp_path, []))
    assert empty.documents is not None
    assert (empty.count, empty.documents.borders(0, 0).tolist()) == (0, [0])


def ends_of(*ends: int) -> bytes:
    return np.array(ends, "<u8").tobytes()


# What lies in place of the file of this suffix, where it is not gone.
DAMAGE = [
    ("", None, "00000_tokens.ds"),
    ("", bytes(24)[:22], "found 22 bytes"),
    ("", bytes(6), "found 6 bytes"),
    ("", bytes(11), "found 11 bytes"),
    (".index", None, "00000_tokens.ds.index"),
    (".index", b"123", "found 3 bytes"),
    (".index", ends_of(3, 7), "7 tokens"),
    (".index", ends_of(2**64 - 1), "-1 tokens"),
    (".index", ends_of(2**63 + 6), "found 12 bytes"),
    (".index", b"", "0 tokens"),
    (".index", "a pipe", ".index"),
    (".loss", bytes(6), ".loss"),
]


@pytest.mark.parametrize(("suffix", "content", "word"), DAMAGE, ids=range(len(DAMAGE)))
def test_files_that_do_not_fit_are_refused(tmp_path: Path, suffix: str, content: bytes | str | None, word: str) -> None:
    path = by_hand(tmp_path, DOCUMENTS)
    file = Path(f"{path}{suffix}")
    file.unlink(missing_ok=True)
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content:
        os.mkfifo(file)
    with refused(DataError, word):
        open_datatrove_file(path)


@pytest.mark.parametrize("ends", [(5, 3, 6), (7, 6), (2**63, 6), (2**64 - 1, 6)])
def test_an_index_that_does_not_increase_is_refused(tmp_path: Path, ends: tuple[int, ...]) -> None:
    path = by_hand(tmp_path, DOCUMENTS)
    Path(f"{path}.index").write_bytes(ends_of(*ends))
    with refused(DataError, ".index"):
        table_of(open_datatrove_file(path), 7)
