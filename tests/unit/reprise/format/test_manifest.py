"""The manifest tells the truth about every byte, or is refused."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reprise.commit.joint_plan import tile
from reprise.errors import CheckpointError, MismatchError
from reprise.format import manifest
from reprise.format.box import Box, intersect, whole
from reprise.format.dtype import StoredDtype
from reprise.format.layout import Layout, TensorKind, TensorSpec, build_layout
from reprise.format.manifest import BLOCK_BYTES, FileEntry, Manifest, TensorEntry, WrittenPiece, digest_of
from reprise.storage import json_file
from tests.messages import refused

A, B = b"12345678", b"abcdefgh"


def layout_of(shape: tuple[int, ...] = (4, 6)) -> Layout:
    specs = [("w", shape), ("step", ()), ("none", (0, 3))]
    return build_layout([TensorSpec(TensorKind.MODEL, name, s, StoredDtype.F32, s) for name, s in specs])


STEP = WrittenPiece("step", whole(()), 0, 4, A)
LEFT = WrittenPiece("w", Box((0, 0), (4, 2)), 0, 32, A)
RIGHT_1 = WrittenPiece("w", Box((0, 2), (4, 4)), 0, 16, A)
RIGHT_2 = WrittenPiece("w", Box((0, 2), (4, 4)), 16, 64, B)
GOOD = [RIGHT_2, STEP, LEFT, RIGHT_1]


def sample() -> Manifest:
    files = {
        "model.safetensors": FileEntry(5000, "0" * 16, is_tensor_file=True),
        "optimizer/state.json": FileEntry(12, "f" * 16, is_tensor_file=False),
    }
    return Manifest("nonce-1", files, tile(layout_of(), GOOD), {"head": "w"})


def resealed(**members: object) -> bytes:
    """Return a manifest with other members and a digest that fits."""
    table = json.loads(manifest.to_bytes(sample()))
    del table["xxh3_64"]
    text = json.dumps({**table, **members}, separators=(",", ":"))[:-1].encode()
    return text + f',"xxh3_64":"{digest_of(text)}"}}\n'.encode()


def test_manifest_round_trips() -> None:
    assert manifest.from_bytes(manifest.to_bytes(sample()), where="x") == sample()
    assert manifest.from_bytes(resealed(), where="x") == sample()


def test_files_without_tensors_may_be_larger_together() -> None:
    """A save limits each, not their sum."""
    files = {name: FileEntry(json_file.MAX_BYTES, "0" * 16, is_tensor_file=False) for name in ("a.bin", "b.bin")}
    assert manifest.from_bytes(manifest.to_bytes(replace(sample(), files=files)), where="x").files == files


@pytest.mark.parametrize("cuts", [[], [[]], [[1, 4]]])
def test_cuts_that_do_not_fit_are_refused_though_the_digest_fits(cuts: object) -> None:
    entry = {"view": [4], "cuts": cuts, "digests": "00" * 8, "shares": {}}
    with pytest.raises(CheckpointError):
        manifest.from_bytes(resealed(tensors={"w": entry}), where="x")


def test_a_newer_manifest_is_refused_by_its_number() -> None:
    with refused(MismatchError, "reprise-manifest/2"):
        manifest.from_bytes(resealed(format="reprise-manifest/2"), where="x")


def blocks_of(entry: TensorEntry, itemsize: int) -> int | None:
    """Return the number of blocks of all pieces, counted cell by cell; None if shares do not fit."""
    count, cells = 0, list(itertools.product(*(list(itertools.pairwise(marks)) for marks in entry.cuts)))
    if not all(0 <= cell < len(cells) for cell in entry.shares):
        return None
    for number, cell in enumerate(cells):
        size = math.prod(hi - lo for lo, hi in cell) * itemsize
        bounds = (0, *entry.shares.get(number, ()), size)
        if entry.shares.get(number) and any(lo >= hi for lo, hi in itertools.pairwise(bounds)):
            return None
        count += sum(-(-(hi - lo) // BLOCK_BYTES) for lo, hi in itertools.pairwise(bounds))
    return count


MARKS = st.sets(st.integers(1, 5), max_size=4).map(lambda marks: (0, *sorted(marks), 6))
MIB = 1 << 20
OFFSETS = st.lists(st.integers(0, 30).map(lambda number: number * MIB), max_size=2).map(lambda o: tuple(sorted(o)))
SPANS = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted)


@given(
    st.lists(MARKS, max_size=2),
    st.dictionaries(st.integers(-1, 12), OFFSETS, max_size=2),
    st.sampled_from([1, 2]),
    st.integers(-1, 1),
    st.integers(-1, 1),
    st.tuples(SPANS, SPANS),
)
@example(cuts=[(0, 6)], shares={0: (8 * MIB, 16 * MIB)}, itemsize=1, odd=0, more=0, spans=([0, 6], [0, 0]))
def test_an_entry_fits_as_if_counted_cell_by_cell(
    cuts: list[tuple[int, ...]],
    shares: dict[int, tuple[int, ...]],
    itemsize: int,
    odd: int,
    more: int,
    spans: tuple[list[int], list[int]],
) -> None:
    rows = (*cuts, (0, 4 * MIB + odd))
    entry = TensorEntry(tuple(marks[-1] for marks in rows), rows, shares, b"")
    count = blocks_of(entry, itemsize)
    entry = replace(entry, digests=bytes(8 * max(0, (100 if count is None else count) + more)))
    assert entry.fits(itemsize) == (count is not None and more == 0)
    if entry.fits(itemsize):
        pieces = [piece for _, piece in entry.pieces_in(whole(entry.view), itemsize)]
        assert b"".join(piece.digests for piece in pieces) == entry.digests
        assert sum(piece.hi - piece.lo for piece in pieces) == math.prod(entry.view) * itemsize
        ends = [*spans[: len(cuts)], [0, 1]]
        box = Box(tuple(lo for lo, _ in ends), tuple(hi - lo for lo, hi in ends))
        expected = [(number, piece) for number, piece in enumerate(pieces) if intersect(piece.box, box).numel]
        assert list(entry.pieces_in(box, itemsize)) == expected


def test_an_empty_tensor_takes_no_memory_for_its_cuts() -> None:
    marks = tuple(range(1 << 20))
    assert TensorEntry((marks[-1], marks[-1], 0), (marks, marks, (0,)), {}, b"").fits(4)  # else 8 TiB
