"""A block is named by its tensor, its bytes and, in a part of the tensor, that part's elements."""

from __future__ import annotations

import pytest

from reprise.format import StoredDtype, TensorKind
from reprise.format.box import Box
from reprise.format.layout import Place, TensorSpec
from reprise.loading.blocks import PieceBlock


@pytest.mark.parametrize(
    ("box", "name"),
    [
        (Box((0, 0), (4, 6)), "bytes [0, 8)"),
        (Box((2, 3), (2, 3)), "bytes [0, 8) of elements [2:4, 3:6]"),
    ],
)
def test_a_block_in_a_part_has_its_elements(box: Box, name: str) -> None:
    spec = TensorSpec(TensorKind.MODEL, "w", (4, 6), StoredDtype.F32, (4, 6))
    assert str(PieceBlock(Place(spec, "a", 0), 0, spec.image(box), 0, 8, "")) == f"a, tensor w, {name}"
