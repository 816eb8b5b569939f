"""Stripes: extents of tensors of which the pieces of one host hold every byte, and no others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from reprise.format.layout import PAGE_BYTES, Layout, build_layout
from reprise.saving import column_sharing as striping
from reprise.saving.column_sharing import STRIPES_AT, Stripes, cut_by_stripes, shared_bytes, stripes_of
from reprise.saving.plan import Piece, columns_of, cut, plan
from tests.fakes import SHARDINGS, Axis, Sharding, sample_specs, sample_state

SPECS = sample_specs()
LAYOUT = build_layout(SPECS, file_bytes=1 << 20)
OF_COLUMNS = [sharding for sharding in SHARDINGS if any(axis.role == "column" for axis in sharding.axes)]


@pytest.fixture(autouse=True, params=[1 << 22, 1 << 14])
def _strip_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(striping, "STRIPE_BYTES", request.param)


def columns(sharding: Sharding, ranks: Sequence[int]) -> list[Piece]:
    """Return the pieces of these ranks that have rows apart."""
    state = sample_state(SPECS, seed=1)
    found = []
    for rank in ranks:
        found += columns_of(cut(plan(sharding.live(rank, SPECS, state), LAYOUT, rank), LAYOUT))
    return found


def held(pieces: Sequence[Piece], layout: Layout, name: str) -> set[int]:
    """Return the bytes of a tensor that these pieces hold."""
    return {
        at
        for piece in pieces
        if piece.name == name
        for first, _, length in layout.places[name].spec.image(piece.box).spans(piece.lo, piece.hi)
        for at in range(first, first + length)
    }


def covered(stripes: Stripes, name: str) -> set[int]:
    return {at for stripe in stripes.get(name, ()) for at in range(stripe.lo, stripe.hi)}


@pytest.mark.parametrize("sharding", OF_COLUMNS, ids=lambda sharding: sharding.name)
def test_the_columns_of_all_ranks_are_in_strips_to_the_last_byte(sharding: Sharding) -> None:
    pieces = columns(sharding, range(sharding.world_size))
    stripes = stripes_of(pieces, LAYOUT)
    assert set(stripes) == {piece.name for piece in pieces} != set()
    for name in stripes:
        assert covered(stripes, name) == held(pieces, LAYOUT, name)


@pytest.mark.parametrize("sharding", OF_COLUMNS, ids=lambda sharding: sharding.name)
def test_what_another_host_holds_is_in_no_strip(sharding: Sharding) -> None:
    pieces = columns(sharding, range(sharding.world_size - 1))
    stripes = stripes_of(pieces, LAYOUT)
    for name in {piece.name for piece in pieces}:
        assert covered(stripes, name) <= held(pieces, LAYOUT, name)
    assert stripes_of(columns(sharding, [0]), LAYOUT) == {}


def test_hosts_that_hold_rows_of_their_own_share_them() -> None:
    sharding = Sharding("rows and columns", (Axis("row", 2), Axis("column", 2)))
    for host in ([0, 1], [2, 3]):
        pieces = columns(sharding, host)
        stripes = stripes_of(pieces, LAYOUT)
        found, expected = covered(stripes, "embedding"), held(pieces, LAYOUT, "embedding")
        assert found <= expected
        # All but what lies in one extent with the other host's.
        assert len(expected) - len(found) <= striping.STRIPE_BYTES


def test_the_order_of_the_pieces_does_not_matter() -> None:
    pieces = columns(OF_COLUMNS[0], range(OF_COLUMNS[0].world_size))
    assert stripes_of(pieces[::-1], LAYOUT) == stripes_of(pieces, LAYOUT)


def test_places_do_not_meet_and_lie_as_the_file_does() -> None:
    stripes = stripes_of(columns(OF_COLUMNS[0], range(2)), LAYOUT)
    end = STRIPES_AT
    for name, found in stripes.items():
        for stripe in found:
            assert stripe.place >= end
            assert (stripe.place - LAYOUT.places[name].offset - stripe.lo) % PAGE_BYTES == 0
            end = stripe.place + stripe.size
    assert shared_bytes(stripes) == end
    numbers = [stripe.number for found in stripes.values() for stripe in found]
    assert numbers == list(range(len(numbers)))


def test_what_exceeds_the_counters_is_in_no_strip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(striping, "MAX_STRIPES", 1)
    stripes = stripes_of(columns(OF_COLUMNS[0], range(2)), LAYOUT)
    assert sum(map(len, stripes.values())) == 1


@pytest.mark.parametrize("sharding", OF_COLUMNS, ids=lambda sharding: sharding.name)
def test_a_piece_is_cut_by_stripes_without_a_gap(sharding: Sharding) -> None:
    pieces = columns(sharding, range(sharding.world_size - 1))
    stripes = stripes_of(pieces, LAYOUT)
    for piece in pieces:
        packed, reached, ways = LAYOUT.places[piece.name].spec.image(piece.box), piece.lo, Counter[bool]()
        for lo, hi, stripe in cut_by_stripes(packed, piece.lo, piece.hi, stripes.get(piece.name, ())):
            assert lo == reached < hi
            reached = hi
            ways[stripe is None] += 1
            places = [at for first, _, length in packed.spans(lo, hi) for at in range(first, first + length)]
            within = covered(stripes, piece.name) if stripe is None else set(range(stripe.lo, stripe.hi))
            assert within.isdisjoint(places) if stripe is None else within.issuperset(places)
        assert reached == piece.hi
