"""Every byte has exactly one writer, and no replica writes much more than another."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.format.box import Box, image, whole
from reprise.format.dtype import StoredDtype
from reprise.format.layout import PAGE_BYTES, Place, TensorKind, TensorSpec, build_layout
from reprise.format.manifest import Piece
from reprise.saving.plan import CHUNK_BYTES, SMALL_BYTES, Holding, cut, pieces_of
from tests.profiles import examples


def placed(name: str, shape: tuple[int, ...], offset: int) -> Place:
    return Place(TensorSpec(TensorKind.MODEL, name, shape, StoredDtype.F32, shape), "model.safetensors", offset)


def everybodys(holdings: list[Holding], world_size: int) -> dict[str, list[tuple[int, Piece]]]:
    """Return all pieces by tensor with their writers, asking each rank with the holdings that it has."""
    found: dict[str, list[tuple[int, Piece]]] = defaultdict(list)
    for rank in range(world_size):
        mine = [holding for holding in holdings if rank in holding.replicas]
        for piece in pieces_of(mine, rank):
            found[piece.name].append((rank, piece))
    return found


@examples(200)
@given(st.data())
def test_pieces_of_all_ranks_tile_every_byte_once(data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, 5))
    groups = st.sets(st.integers(0, world_size - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
    holdings, offset = [], 4096
    for number in range(data.draw(st.integers(0, 8))):
        shape = data.draw(st.tuples(st.integers(0, 300), st.integers(1, 300)))
        lo, hi = sorted(data.draw(st.tuples(st.integers(0, shape[1]), st.integers(0, shape[1]))))
        box = data.draw(st.sampled_from([whole(shape), Box((0, lo), (shape[0], hi - lo))]))
        holdings.append(Holding(placed(f"t{number}", shape, offset), image(box, shape, 4), data.draw(groups)))
        offset += shape[0] * shape[1] * 4
    found = everybodys(holdings, world_size)
    for holding in holdings:
        pieces = found.get(holding.place.spec.name, [])
        spans = sorted((piece.lo, piece.hi) for _, piece in pieces)
        total = holding.image.total_bytes
        assert all(lo < hi for lo, hi in spans)
        assert [0, *(hi for _, hi in spans)] == [*(lo for lo, _ in spans), total]
        for rank, piece in pieces:
            assert rank in holding.replicas
            assert piece.box == holding.image.box
        inner_cuts = [lo for lo, _ in spans if lo]
        if total < SMALL_BYTES:
            assert len(spans) <= 1
        elif holding.image.is_contiguous:
            first = holding.place.offset + next(holding.image.spans(0, 1))[0]
            assert all((first + cut) % PAGE_BYTES == 0 for cut in inner_cuts)
        else:
            assert all(cut % holding.image.run_bytes == 0 for cut in inner_cuts)


@pytest.mark.parametrize("world_size", [2, 8, 64])
def test_replicas_of_a_model_write_equal_shares(world_size: int) -> None:
    shapes: list[tuple[int, ...]] = [(50257, 768), (1024, 768), *48 * [(768, 3072), (768,)], *400 * [(1000,)]]
    images = [image(whole(shape), shape, 4) for shape in shapes]
    offsets = itertools.accumulate((packed.total_bytes for packed in images), initial=PAGE_BYTES)
    places = [placed(f"t{at}", shape, at) for shape, at in zip(shapes, offsets, strict=False)]
    replicas = tuple(range(world_size))
    holdings = [Holding(place, packed, replicas) for place, packed in zip(places, images, strict=True)]
    written = np.array([sum(piece.hi - piece.lo for piece in pieces_of(holdings, rank)) for rank in replicas])
    assert written.sum() == sum(packed.total_bytes for packed in images)
    assert written.max() / written.mean() <= 1.05


def test_all_but_the_ends_of_a_run_lie_on_pages() -> None:
    shapes = {"bias": (5,), "large": (5_000_001,)}
    specs = {name: placed(name, shape, 0).spec for name, shape in shapes.items()}
    pieces = [Piece(name, whole(shapes[name]), 0, specs[name].total_bytes) for name in ("large", "bias")]
    places = build_layout(list(specs.values())).places
    holdings = [Holding(place, image(whole(place.spec.view), place.spec.view, 4), (0,)) for place in places.values()]
    ((chunks,),) = cut(pieces, holdings).values()
    assert len(chunks) == 3
    assert all(chunk.size <= CHUNK_BYTES for chunk in chunks)
    assert [part.piece.name for part in chunks[0].parts] == ["bias", "large"]
    for before, after in itertools.pairwise(chunks):
        assert before.offset + before.size == after.offset
        assert after.offset % PAGE_BYTES == 0
