"""Digests of boxes add up to that of the tensor, however it is cut."""

from __future__ import annotations

import pytest
import torch

from trainer.steps import recorder
from trainer.steps.recorder import box_digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_digests_of_boxes_add_up(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    tensor = (torch.arange(7 * 6 * 5).view(7, 6, 5) * 37 % 101).to(dtype)
    whole = box_digest(tensor, (0, 0, 0), tensor.shape)
    for row, column in ((3, 0), (5, 2), (0, 6)):
        corners = [(0, row, 0, column), (0, row, column, 6), (row, 7, 0, column), (row, 7, column, 6)]
        digests = [box_digest(tensor[a:b, c:d], (a, c, 0), tensor.shape) for a, b, c, d in corners]
        assert sum(digests) % 2**64 == whole
    monkeypatch.setattr(recorder, "_CHUNK", 60)  # several chunks
    assert box_digest(tensor, (0, 0, 0), tensor.shape) == whole


def test_a_bit_or_an_exchange_changes_a_digest() -> None:
    tensor = torch.arange(24.0).view(4, 6)
    whole = box_digest(tensor, (0, 0), tensor.shape)
    flipped = tensor.clone()
    flipped.view(torch.int32)[2, 3] ^= 1
    for changed in (flipped, tensor.flip(0), tensor.flip(1), -tensor):
        assert box_digest(changed, (0, 0), tensor.shape) != whole
    highest = torch.tensor(torch.iinfo(torch.int64).min)  # the highest bit alone, which an even factor would lose
    assert box_digest(highest, (), ()) != box_digest(torch.tensor(0), (), ())
    signs = torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    assert len({box_digest(row, (0,), (2,)) for row in signs}) == 2
    assert box_digest(torch.empty(0, 3), (4, 0), (4, 3)) == 0


def test_records_of_other_versions_can_be_compared() -> None:
    assert box_digest(torch.arange(12.0).view(3, 4), (0, 0), (3, 4)) == 0xFA4549F2C8801B63
