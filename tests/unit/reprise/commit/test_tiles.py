"""Pieces checked in columns give the entries that pieces checked one by one give, or are left to that check."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.commit.tiles import entries_of
from reprise.format import manifest
from reprise.format.box import Box
from reprise.format.dtype import StoredDtype
from reprise.format.layout import TensorKind, TensorSpec, build_layout
from reprise.format.manifest import BLOCK_BYTES, DIGEST_BYTES, WrittenPiece, block_count
from reprise.format.report import encode
from tests.profiles import examples

SPECS = [
    TensorSpec(TensorKind.MODEL, name, shape, dtype, shape)
    for name, shape, dtype in (
        ("scalar", (), StoredDtype.F32),
        ("empty", (0, 3), StoredDtype.F32),
        ("matrix", (6, 4), StoredDtype.BF16),
        ("cube", (2, 3, 4), StoredDtype.F32),
        ("large", (BLOCK_BYTES,), StoredDtype.F32),
    )
]
LAYOUT = build_layout(SPECS)


@st.composite
def divisions(draw: st.DrawFn) -> list[list[WrittenPiece]]:
    """Return pieces that tile all tensors, dealt to three tables in any order; each block has its number as digest."""
    pieces = []
    for spec in SPECS:
        cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in spec.shape]
        for box in manifest._cells(cuts):
            total = box.numel * spec.dtype.itemsize
            if total:
                marks = sorted({0, total, *draw(st.lists(st.integers(1, total - 1), max_size=2))})
                pieces += [WrittenPiece(spec.name, box, *ends, b"") for ends in itertools.pairwise(marks)]
    tables: list[list[WrittenPiece]] = [[], [], []]
    for piece in draw(st.permutations(pieces)):
        tables[draw(st.integers(0, 2))].append(piece)
    return numbered(tables)


def numbered(tables: list[list[WrittenPiece]]) -> list[list[WrittenPiece]]:
    """Return the pieces with the number of each block as its digest."""
    number, found = 0, []
    for table in tables:
        found.append([])
        for piece in table:
            numbers = range(number, number + block_count(piece.hi - piece.lo))
            found[-1].append(replace(piece, digests=b"".join(n.to_bytes(DIGEST_BYTES, "little") for n in numbers)))
            number = numbers.stop
    return found


@given(divisions())
@examples(40)
def test_columns_give_the_entries_of_pieces(tables: list[list[WrittenPiece]]) -> None:
    found = entries_of(LAYOUT, [encode(table, LAYOUT) for table in tables])
    assert found is not None
    entries, counts = found
    assert entries == manifest.tile(LAYOUT, [piece for table in tables for piece in table])
    assert list(entries) == list(LAYOUT.places)
    assert counts == [sum(len(piece.digests) for piece in table) // DIGEST_BYTES for table in tables]


WHOLE = numbered(
    [[WrittenPiece(s.name, Box((0,) * len(s.shape), s.shape), 0, s.total_bytes, b"") for s in SPECS if s.total_bytes]]
)[0]


def test_a_single_table_tiles() -> None:
    assert entries_of(LAYOUT, [encode(WHOLE, LAYOUT)]) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"lo": 1},
        {"hi": 40},
        {"lo": 48},
        {"box": Box((0, 0), (5, 4))},
        {"box": Box((0, 1), (6, 4))},
        {"box": Box((0, 0), (6, 0))},
        {"box": Box((0,), (24,))},
        {"box": Box((2**63 - 1, 0), (2, 4))},
        {"name": "cube"},
        {"name": "empty"},
        {"digests": bytes(16)},
    ],
    ids=str,
)
def test_pieces_that_do_not_tile_are_left_to_the_other_check(change: dict[str, object]) -> None:
    number = [piece.name for piece in WHOLE].index("matrix")
    wrong = replace(WHOLE[number], **change)  # type: ignore[arg-type]
    assert entries_of(LAYOUT, [encode([*WHOLE[:number], wrong, *WHOLE[number + 1 :]], LAYOUT)]) is None


def test_a_missing_or_second_piece_is_left_to_it_too() -> None:
    assert entries_of(LAYOUT, [encode(WHOLE[:-1], LAYOUT), b""]) is None
    assert entries_of(LAYOUT, [encode(WHOLE, LAYOUT), encode(WHOLE[:1], LAYOUT)]) is None
    assert entries_of(LAYOUT, [b"", b""]) is None


def test_pieces_of_other_dimensions_are_left_to_it_too() -> None:
    number = [piece.name for piece in WHOLE].index("matrix")
    assert entries_of(LAYOUT, [encode([*WHOLE, replace(WHOLE[number], box=Box((0,), (24,)))], LAYOUT)]) is None
