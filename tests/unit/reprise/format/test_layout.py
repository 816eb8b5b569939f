"""Where tensors lie on disk, to the byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.errors import CheckpointError
from reprise.format.dtype import StoredDtype
from reprise.format.layout import (
    MOST_DIMENSIONS,
    TensorKind,
    TensorSpec,
    build_layout,
)
from tests.messages import refused


def spec(
    name: str, shape: tuple[int, ...], dtype: StoredDtype = StoredDtype.F32, kind: TensorKind = TensorKind.MODEL
) -> TensorSpec:
    return TensorSpec(kind, name, shape, dtype, shape)


def test_header_of_a_small_example_is_these_bytes() -> None:
    layout = build_layout([spec("bias", (2,), StoredDtype.BF16), spec("wé", (2, 3)), spec("n", (), StoredDtype.I64)])
    (file,) = layout.files
    text = (
        '{"__metadata__":{"format":"pt"},'
        '"n":{"dtype":"I64","shape":[],"data_offsets":[0,8]},'
        '"wé":{"dtype":"F32","shape":[2,3],"data_offsets":[8,32]},'
        '"bias":{"dtype":"BF16","shape":[2],"data_offsets":[32,36]}}'
    ).encode()
    assert file.name == "model.safetensors"
    assert file.header == b"\xf8\x0f\0\0\0\0\0\0" + text + b" " * (4088 - len(text))
    assert file.total_bytes == 4096 + 36
    assert {name: place.offset for name, place in layout.places.items()} == {"n": 4096, "wé": 4104, "bias": 4128}


@given(st.data())
def test_layout_has_no_holes_keeps_order_and_starts_on_a_page(data: st.DataObject) -> None:
    dtypes = st.sampled_from([StoredDtype.F64, StoredDtype.F32, StoredDtype.BF16, StoredDtype.U8])
    shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    parts = data.draw(st.lists(st.tuples(st.sampled_from(TensorKind), shapes, dtypes), max_size=12))
    specs = [spec(f"t{i}" * 40, shape, dtype, kind) for i, (kind, shape, dtype) in enumerate(parts)]
    file_bytes = data.draw(st.integers(1, 2000))
    layout = build_layout(specs, file_bytes=file_bytes)
    assert layout.total_bytes == sum(file.total_bytes for file in layout.files)
    for kind in TensorKind:
        mine = [p.spec for file in layout.files for p in file.places if p.spec.kind is kind]
        assert mine == sorted((s for s in specs if s.kind is kind), key=lambda s: -s.dtype.itemsize)
    for file in layout.files:
        assert len(file.header) % 4096 == 0
        position = len(file.header)
        for place in file.places:
            assert place.offset == position
            assert place.file == file.name
            assert layout.places[place.spec.name] == place
            position += place.spec.total_bytes
        assert file.total_bytes == position
        is_adapters = file.places[0].spec.kind is TensorKind.ADAPTER  # all in one file, which is how PEFT reads them
        assert is_adapters or len(file.places) == 1 or position - len(file.header) <= file_bytes
    assert sum(file.places[0].spec.kind is TensorKind.ADAPTER for file in layout.files) <= 1


@pytest.mark.parametrize(
    ("specs", "name"),
    [
        ([spec("w", (1,)), spec("w", (1,), kind=TensorKind.OPTIMIZER)], "w"),
        ([spec("__metadata__", (1,))], "__metadata__"),
        ([spec("w", (1,) * (MOST_DIMENSIONS + 1))], "w"),  # more dimensions than readers take
    ],
)
def test_a_name_or_shape_that_no_file_takes_is_refused(specs: list[TensorSpec], name: str) -> None:
    with refused(CheckpointError, f"({name})"):
        build_layout(specs)
    build_layout([spec("w", (1,) * MOST_DIMENSIONS)])
    assert build_layout([]).files == ()
