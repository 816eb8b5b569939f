"""A block is named by its tensor, its bytes and, in a part of the tensor, that part's elements."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reprise.format import StoredDtype, TensorKind
from reprise.format.box import Box
from reprise.format.layout import Place, TensorSpec
from reprise.format.manifest import BLOCK_BYTES, digest_of
from reprise.loading.blocks import PieceBlock
from reprise.loading.reader import OpenFile
from reprise.storage.files import FILE_SYSTEM, Files
from reprise.storage.patience import with_retries
from reprise.stores.files import StoreFiles


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


@pytest.mark.parametrize(("files", "count"), [(FILE_SYSTEM, 8), (StoreFiles(), 1), (with_retries(StoreFiles()), 1)])
def test_a_block_in_a_store_is_one_request(files: Files, count: int) -> None:
    class Read(OpenFile):
        def read(self, buffer: memoryview, offset: int) -> None:
            sizes.append(buffer.nbytes)

    sizes = list[int]()
    spec = TensorSpec(TensorKind.MODEL, "w", (BLOCK_BYTES,), StoredDtype.U8, (BLOCK_BYTES,))
    file, into = Read(files, Path("a"), 0), np.zeros(BLOCK_BYTES, np.uint8)
    whole = spec.image(Box((0,), (BLOCK_BYTES,)))
    block = PieceBlock(Place(spec, "a", 0), 0, whole, 0, BLOCK_BYTES, digest_of(into.data))
    block.read(file, into)
    assert sizes == [BLOCK_BYTES // count] * count
