"""What a load at another topology reads, as `scripts.bench.reads` plans it."""

from __future__ import annotations

from pathlib import Path

import pytest

from reprise.layout import BLOCK_BYTES, Box, WrittenPiece
from scripts.bench import reads


def test_every_load_reads_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert reads.main(["tiny"]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    factors = [(float(first), float(every)) for *_, first, _, every in map(str.split, rows)]
    assert factors == [(1.0, 1.042), (1.0, 8.0), (1.0, 1.042)]


def test_a_block_is_read_whole() -> None:
    rows = 3 * BLOCK_BYTES // 1024
    piece = WrittenPiece("w", Box((0, 0), (rows, 256)), 0, rows * 1024, b"")
    second = [(BLOCK_BYTES, 2 * BLOCK_BYTES)]
    assert list(reads.blocks_read(piece, Box((rows // 3, 0), (1, 256)), 4)) == second
    assert len(list(reads.blocks_read(piece, Box((0, 5), (rows, 1)), 4))) == 3


def test_a_second_read_takes_nothing_from_the_device(tmp_path: Path) -> None:
    _, second = reads.read_twice(tmp_path, total_bytes=2 * BLOCK_BYTES)
    assert second.startswith("second read: 0.000 of the bytes from the device")
