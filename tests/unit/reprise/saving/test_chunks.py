"""Chunks: every byte of every piece once, in the order of the file, cut on pages; digests of the pieces' blocks."""

from __future__ import annotations

import itertools

import pytest
import torch
import xxhash

from reprise.format.box import Box, image
from reprise.format.dtype import StoredDtype
from reprise.format.layout import PAGE_BYTES, TensorKind, TensorSpec, build_layout
from reprise.format.manifest import BLOCK_BYTES, DIGEST_BYTES
from reprise.saving import plan as chunking
from reprise.saving.plan import CHUNK_BYTES, Piece, cut, plan
from reprise.saving.writer import PieceDigests
from tests.fakes import SHARDINGS, Sharding, sample_specs, sample_state

SPECS = sample_specs()
LARGE = TensorSpec(TensorKind.MODEL, "large", (5_000_001,), StoredDtype.F32, (5_000_001,))


@pytest.fixture(autouse=True, params=[1 << 40, 1 << 14])
def _extents(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "EXTENT_BYTES", request.param)


@pytest.mark.parametrize("sharding", SHARDINGS, ids=lambda sharding: sharding.name)
def test_chunks_hold_every_byte_of_every_piece_once_and_in_order(sharding: Sharding) -> None:
    layout = build_layout(SPECS, file_bytes=1 << 20)
    state = sample_state(SPECS, seed=1)
    for rank in range(sharding.world_size):
        pieces = plan(sharding.live(rank, SPECS, state), layout, rank)
        reached = {piece.name: piece.lo for piece in pieces}
        for name, extents in cut(pieces, layout).items():
            for chunk in itertools.chain(*extents):
                assert 0 < chunk.size == sum(part.hi - part.lo for part in chunk.parts) <= CHUNK_BYTES
                for part in chunk.parts:
                    assert layout.places[part.piece.name].file == name
                    assert part.lo == reached[part.piece.name]
                    reached[part.piece.name] = part.hi
        assert reached == {piece.name: piece.hi for piece in pieces}


@pytest.mark.parametrize("sharding", SHARDINGS, ids=lambda sharding: sharding.name)
def test_parts_of_a_chunk_follow_each_other_in_the_file(sharding: Sharding) -> None:
    layout = build_layout(SPECS, file_bytes=1 << 20)
    state = sample_state(SPECS, seed=1)
    for rank in range(sharding.world_size):
        for extents in cut(plan(sharding.live(rank, SPECS, state), layout, rank), layout).values():
            for chunk in (chunk for chunk in itertools.chain(*extents) if chunk.strided is None):
                position = chunk.offset
                for part in chunk.parts:
                    place = layout.places[part.piece.name]
                    packed = image(part.piece.box, place.spec.view, place.spec.dtype.itemsize)
                    assert [(place.offset + at, n) for at, _, n in packed.spans(part.lo, part.hi)] == [
                        (position, part.hi - part.lo)
                    ]
                    position += part.hi - part.lo


def test_all_but_the_ends_of_a_run_lie_on_pages() -> None:
    bias = TensorSpec(TensorKind.MODEL, "bias", (5,), StoredDtype.F32, (5,))
    layout = build_layout([bias, LARGE])
    pieces = [Piece(s.name, Box((0,), s.shape), 0, s.total_bytes) for s in (LARGE, bias)]
    ((chunks,),) = cut(pieces, layout).values()
    assert len(chunks) == 3
    assert [part.piece.name for part in chunks[0].parts] == ["bias", "large"]
    for before, after in itertools.pairwise(chunks):
        assert before.offset + before.size == after.offset
        assert after.offset % PAGE_BYTES == 0


def test_digests_do_not_depend_on_how_a_piece_is_cut() -> None:
    layout = build_layout([LARGE])
    piece = Piece("large", Box((0,), LARGE.shape), 1_000_004, LARGE.total_bytes)
    data = memoryview(torch.arange(LARGE.shape[0], dtype=torch.float32).view(torch.uint8).numpy())  # type: ignore[arg-type]
    digests = PieceDigests()
    for chunk in itertools.chain(*cut([piece], layout)["model.safetensors"]):
        for part in chunk.parts:
            digests.add(part, data[part.lo : part.hi])
    expected = [
        xxhash.xxh3_64_intdigest(data[lo : min(lo + BLOCK_BYTES, piece.hi)]).to_bytes(DIGEST_BYTES, "big")
        for lo in range(piece.lo, piece.hi, BLOCK_BYTES)
    ]
    assert digests.all() == {"large": b"".join(expected)}
