"""Tables of pieces travel once; every manifest has the pieces and digests of its own save."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.commit.joint_plan import JointPlan, KnownPlans, encode, tile
from reprise.commit.messages import Message
from reprise.errors import CheckpointError
from reprise.format.box import Box, whole
from reprise.format.dtype import StoredDtype
from reprise.format.layout import TensorKind, TensorSpec, build_layout
from reprise.format.manifest import BLOCK_BYTES, DIGEST_BYTES, TensorEntry, WrittenPiece, block_count
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


def cells_of(cuts: Sequence[Sequence[int]]) -> Iterator[Box]:
    """Yield the boxes between the cuts of each dimension, in C order."""
    for cell in itertools.product(*(itertools.pairwise(marks) for marks in cuts)):
        yield Box(tuple(lo for lo, _ in cell), tuple(hi - lo for lo, hi in cell))


@st.composite
def divisions(draw: st.DrawFn) -> Division:
    """Return pieces that tile all tensors, dealt to the ranks in any order."""
    pieces = []
    for spec in SPECS:
        cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in spec.shape]
        for box in cells_of(cuts):
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


def offers_of(plans: Sequence[KnownPlans], division: Division) -> dict[int, Message]:
    """Return the offers of the ranks, as they arrive."""
    offers = {}
    for rank, pieces in enumerate(division):
        offer = plans[rank].offer(encode(pieces, LAYOUT))
        offers[rank] = Message.from_bytes(offer.to_bytes())
    return offers


def digests_of(division: Division) -> list[bytes]:
    return [b"".join(piece.digests for piece in pieces) for pieces in division]


def require_digests_of_pieces(tensors: Mapping[str, TensorEntry], division: Division) -> None:
    """Require that the entries have every written piece once, with its digests."""
    expected = sorted((p.name, p.box.offset, p.box.shape, p.lo, p.hi, p.digests) for ps in division for p in ps)
    entries = [
        (name, p.box.offset, p.box.shape, p.lo, p.hi, p.digests)
        for name, entry in tensors.items()
        for _, p in entry.pieces_in(whole(entry.view), LAYOUT.places[name].spec.dtype.itemsize)
        if p.box.numel
    ]
    assert sorted(entries) == expected


# What each rank learns of an opening: that it is open, or nothing.
@given(st.lists(divisions(), min_size=1, max_size=2), st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=5))
@examples(100)
def test_each_manifest_has_the_pieces_of_its_own_save(drawn: list[Division], attempts: list[tuple[int, bool]]) -> None:
    plans, delivered = [KnownPlans() for _ in range(RANKS)], dict[int, bytes]()
    for number, (chosen, is_open) in enumerate([(0, True), *attempts]):
        division = digested(drawn[chosen % len(drawn)], first=1000 * number)
        offers = offers_of(plans, division)
        for rank, offer in offers.items():
            is_new = encode(division[rank], LAYOUT) != delivered.pop(rank, None)
            assert bool(offer.payload) == is_new
            assert is_new or len(offer.to_bytes()) <= 23
        tensors = plans[0].joint(LAYOUT, offers).tensors(digests_of(division))
        require_digests_of_pieces(tensors, division)
        assert list(tensors) == list(LAYOUT.places)
        for rank in range(RANKS):
            if is_open:
                plans[rank].delivered(offers[rank])
                delivered[rank] = encode(division[rank], LAYOUT)


SMALL = build_layout(
    [
        TensorSpec(TensorKind.MODEL, name, shape, StoredDtype.F32, shape)
        for name, shape in (("w", (4, 6)), ("step", ()), ("none", (0, 3)))
    ]
)
A, B = b"12345678", b"abcdefgh"
STEP = WrittenPiece("step", whole(()), 0, 4, A)
LEFT = WrittenPiece("w", Box((0, 0), (4, 2)), 0, 32, A)
RIGHT_1 = WrittenPiece("w", Box((0, 2), (4, 4)), 0, 16, A)
RIGHT_2 = WrittenPiece("w", Box((0, 2), (4, 4)), 16, 64, B)
GOOD = [RIGHT_2, STEP, LEFT, RIGHT_1]


@pytest.mark.parametrize(
    ("tensor", "pieces"),
    [
        ("w", [STEP]),  # nothing of it
        ("w", [STEP, LEFT]),  # a box is missing
        ("w", [STEP, LEFT, RIGHT_1]),  # a share is
        ("w", [STEP, LEFT, RIGHT_2]),
        ("step", [LEFT, RIGHT_1, RIGHT_2]),
        ("none", [*GOOD, WrittenPiece("none", Box((0, 0), (0, 3)), 0, 4, A)]),
        ("w", [*GOOD, LEFT]),
        ("w", [*GOOD, RIGHT_1]),
        ("w", [STEP, LEFT, replace(RIGHT_1, hi=20), RIGHT_2]),  # overlapping shares
        ("w", [STEP, LEFT, replace(RIGHT_1, hi=12), RIGHT_2]),  # a gap
        ("w", [STEP, LEFT, RIGHT_1, replace(RIGHT_2, hi=68)]),
        ("w", [*GOOD, replace(RIGHT_1, lo=16)]),  # without bytes
        ("w", [STEP, replace(LEFT, box=whole((4, 6)), hi=96), RIGHT_1, RIGHT_2]),  # a box over two
        *(
            ("w", [*GOOD, replace(LEFT, box=Box(offset, shape), hi=hi)])
            for offset, shape, hi in (
                ((0, 1), (4, 2), 32),  # overlapping
                ((4, 0), (1, 6), 24),
                ((0, 0), (4, 0), 32),
                ((2**63 - 1, 0), (2, 2), 16),
                ((0,), (4,), 32),
                ((0, 0, 0), (4, 2, 1), 32),
            )
        ),
    ],
)
def test_pieces_that_do_not_cover_once_are_refused(tensor: str, pieces: list[WrittenPiece]) -> None:
    with refused(CheckpointError, tensor):
        tile(SMALL, pieces)


@pytest.mark.parametrize("digests", [b"", A[:7], A + B])
def test_a_piece_has_one_digest_for_each_block(digests: bytes) -> None:
    with refused(CheckpointError):
        tile(SMALL, [STEP, LEFT, replace(RIGHT_1, digests=digests), RIGHT_2])


@pytest.mark.parametrize("change", [{"dtype": StoredDtype.I32}, {"view": (2, 12)}, {"name": "v"}], ids=str)
def test_ranks_with_other_tensors_are_named(change: dict[str, object]) -> None:
    specs = [replace(p.spec, **(change if p.spec.name == "w" else {})) for p in SMALL.places.values()]  # type: ignore[arg-type]
    tables = {
        0: encode(GOOD, SMALL),
        **{rank: encode([], build_layout(specs)) for rank in (1, 3)},
        2: encode([], SMALL),
    }
    with refused(CheckpointError, "ranks 0, 2 against ranks 1, 3"):
        JointPlan.of(SMALL, tables)


def test_a_table_that_rank_0_lacks_commits_nothing() -> None:
    plan = KnownPlans()
    with refused(CheckpointError, "rank 0"):
        plan.joint(SMALL, {0: replace(plan.offer(encode(GOOD, SMALL)), payload=b"")})
