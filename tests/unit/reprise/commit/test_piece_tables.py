"""Tables of pieces travel once; every manifest has the pieces and digests of its own save."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.commit.piece_tables import PieceTables, Tiling
from reprise.commit.tiles import entries_of
from reprise.errors import CheckpointError
from reprise.format import manifest
from reprise.format.box import Box, whole
from reprise.format.dtype import StoredDtype
from reprise.format.layout import TensorKind, TensorSpec, build_layout
from reprise.format.manifest import BLOCK_BYTES, DIGEST_BYTES, WrittenPiece, block_count
from reprise.format.report import RankReport, decode, encode
from tests.messages import refused
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
RANKS = 3
Division = Sequence[Sequence[WrittenPiece]]


@st.composite
def divisions(draw: st.DrawFn) -> Division:
    """Return pieces that tile all tensors, dealt to the ranks in any order."""
    pieces = []
    for spec in SPECS:
        cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in spec.shape]
        for box in manifest._cells(cuts):
            if total := box.numel * spec.dtype.itemsize:
                marks = sorted({0, total, *draw(st.lists(st.integers(1, total - 1), max_size=2))})
                pieces += [WrittenPiece(spec.name, box, *ends, b"") for ends in itertools.pairwise(marks)]
    tables: list[list[WrittenPiece]] = [[] for _ in range(RANKS)]
    for piece in draw(st.permutations(pieces)):
        tables[draw(st.integers(0, RANKS - 1))].append(piece)
    return tables


def digested(division: Division, first: int = 0) -> Division:
    """Return the pieces with a number for each block, counted from `first`, as its digest."""
    numbers = itertools.count(first)
    return [
        [
            replace(
                piece,
                digests=b"".join(
                    next(numbers).to_bytes(DIGEST_BYTES, "little") for _ in range(block_count(piece.hi - piece.lo))
                ),
            )
            for piece in pieces
        ]
        for pieces in division
    ]


def reports_of(tables: Sequence[PieceTables], division: Division) -> dict[int, RankReport]:
    """Return the reports of the ranks, as they arrive."""
    reports = {}
    for rank, pieces in enumerate(division):
        report = RankReport(7, digests=b"".join(piece.digests for piece in pieces))
        reports[rank] = RankReport.from_bytes(tables[rank].pack(report, encode(pieces, LAYOUT)).to_bytes())
    return reports


# Whether the reports arrive at rank 0; what each rank learns: a commit, another end, nothing.
ENDS = st.tuples(st.booleans(), st.tuples(*[st.sampled_from([True, True, False, None])] * RANKS))


@given(st.lists(divisions(), min_size=1, max_size=2), st.lists(st.tuples(st.integers(0, 1), ENDS), max_size=5))
@examples(150)
def test_each_manifest_has_the_pieces_of_its_own_save(
    drawn: list[Division], attempts: list[tuple[int, tuple[bool, tuple[bool | None, ...]]]]
) -> None:
    tables, delivered = [PieceTables() for _ in range(RANKS)], dict[int, bytes]()
    for number, (chosen, (has_arrived, endings)) in enumerate([(0, (True, (True,) * RANKS)), *attempts]):
        division = digested(drawn[chosen % len(drawn)], first=1000 * number)
        reports = reports_of(tables, division)
        for rank, report in reports.items():
            is_new = encode(division[rank], LAYOUT) != delivered.pop(rank, None)
            assert bool(report.table) == is_new
            assert is_new or len(report.to_bytes()) - len(report.digests) <= 100
        if has_arrived:
            assert entries_of(LAYOUT, [encode(pieces, LAYOUT) for pieces in division]) is not None  # not piece by piece
            tensors = tables[0].tiling(LAYOUT, reports).tensors([report.digests for report in reports.values()])
            assert tensors == manifest.tile(LAYOUT, [piece for pieces in division for piece in pieces])
            assert list(tensors) == list(LAYOUT.places)
        for rank, ending in enumerate(endings):
            if ending is not None:
                tables[rank].ended(is_committed=ending and has_arrived)
            if ending and has_arrived:
                delivered[rank] = encode(division[rank], LAYOUT)


ENTIRE = {spec.name: WrittenPiece(spec.name, whole(spec.shape), 0, spec.total_bytes, b"") for spec in SPECS}
del ENTIRE["empty"]
(PIECES,) = digested([list(ENTIRE.values())])


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
    pieces = [replace(piece, **change) if piece.name == "matrix" else piece for piece in PIECES]  # type: ignore[arg-type]
    assert entries_of(LAYOUT, [encode(pieces, LAYOUT)]) is None


@pytest.mark.parametrize(
    "tables", [[PIECES[:-1], []], [PIECES, PIECES[:1]], [[], []]], ids=["missing", "second", "none"]
)
def test_a_missing_or_second_piece_is_refused(tables: Division) -> None:
    with refused(CheckpointError):
        Tiling.of(LAYOUT, [encode(pieces, LAYOUT) for pieces in tables])


def test_a_table_that_rank_0_lacks_commits_nothing() -> None:
    tables = [PieceTables()]
    reports = {0: replace(reports_of(tables, [PIECES])[0], table=b"")}
    with refused(CheckpointError, "rank 0"):
        tables[0].tiling(LAYOUT, reports)


def test_other_tensors_under_the_same_table_are_checked_again() -> None:
    tables = [PieceTables()]
    tables[0].tiling(LAYOUT, reports_of(tables, [PIECES]))
    tables[0].ended(is_committed=True)
    taller = build_layout([replace(s, shape=(7, 4), view=(7, 4)) if s.name == "matrix" else s for s in SPECS])
    with refused(CheckpointError, "matrix"):
        tables[0].tiling(taller, reports_of(tables, [PIECES]))


@pytest.mark.parametrize("blocks", [0, 1])
def test_a_rank_has_one_digest_for_each_of_its_blocks(blocks: int) -> None:
    tiling = Tiling.of(LAYOUT, [encode(PIECES, LAYOUT)])
    with refused(CheckpointError):
        tiling.tensors([bytes(blocks * DIGEST_BYTES)])


def test_each_piece_belongs_to_the_rank_that_wrote_it() -> None:
    lower, upper = Box((0, 0), (3, 4)), Box((3, 0), (3, 4))
    halves = [(lower, 8, 24), (upper, 0, 24), (lower, 0, 8)]
    pieces = [WrittenPiece("matrix", box, lo, hi, bytes(DIGEST_BYTES)) for box, lo, hi in halves]
    others = [piece for piece in PIECES if piece.name != "matrix"]
    tiling = Tiling.of(LAYOUT, [encode(table, LAYOUT) for table in ([pieces[0], *others], pieces[1:])])
    writers = tiling.writers({spec.name: spec.dtype.itemsize for spec in SPECS})
    assert (writers["empty"], writers["cube"], writers["matrix"]) == ((), (0,), (1, 0, 1))


def test_a_table_without_digests_decodes_to_bare_pieces() -> None:
    first = PIECES[0].digests
    pieces = decode(encode(PIECES, LAYOUT), first, LAYOUT)
    assert [piece.digests for piece in pieces] == [first, *[b""] * (len(PIECES) - 1)]
