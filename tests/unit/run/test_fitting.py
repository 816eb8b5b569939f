"""Stored weights fill tensors of another dtype or size, the same bits however these are cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from reprise.format import Box, StoredDtype, TensorKind, TensorSpec
from reprise.tensors import LiveTensor
from tests.harness import compose
from trainer.run.fitting import Fitting

MODEL = compose(["model=gpt2_tiny"]).model
TABLE = torch.randn(10, 4, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
STORED = TensorSpec(TensorKind.MODEL, "t", (10, 4), StoredDtype.BF16, (10, 4))


def live(lo: int, hi: int, rows: int) -> LiveTensor:
    spec = TensorSpec(TensorKind.MODEL, "t", (rows, 4), StoredDtype.F32, (rows, 4))
    return LiveTensor(spec, Box((lo, 0), (hi - lo, 4)), torch.full((hi - lo, 4), 7.0), (0,))


def read(tensor: LiveTensor) -> None:
    assert tensor.spec.shape == (10, 4)
    tensor.local.copy_(TABLE[tensor.box.slices])


def fitted(tensor: LiveTensor) -> torch.Tensor:
    fitting = Fitting([tensor], {"t": STORED}, MODEL, 5)
    for request in fitting.requests:
        read(request)
    fitting.finish()
    return tensor.local


@pytest.mark.parametrize(("rows", "cuts"), [(16, (0, 16)), (16, (0, 5, 16)), (16, (0, 12, 16)), (7, (0, 3, 7))])
def test_old_rows_are_kept_by_number_at_any_cut(rows: int, cuts: tuple[int, ...]) -> None:
    found = torch.cat([fitted(live(lo, hi, rows)) for lo, hi in pairwise(cuts)])
    old = min(rows, 10)
    assert torch.equal(found[:old], TABLE[:old].float())
    assert all(torch.equal(row, torch.full((4,), 7.0)) for row in found[old:])


def test_a_table_of_another_size_begins_as_in_a_fresh_run() -> None:
    spec = TensorSpec(TensorKind.MODEL, "transformer.wpe.weight", (256, 128), StoredDtype.F32, (256, 128))
    table = LiveTensor(spec, Box((0, 0), (256, 128)), torch.zeros(256, 128), (0,))
    assert Fitting([table], {spec.name: spec}, MODEL, 5).notes("x") == []
    assert not table.local.any()
    smaller = replace(spec, shape=(100, 128), view=(100, 128))
    assert Fitting([table], {spec.name: smaller}, MODEL, 5).notes("x") == [
        f"{spec.name}: 100 rows of x are kept by number"
    ]
    assert table.local.std() > 0.01
