"""What is put into a target is in the live tensor, however that lies in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reprise.format.box import Box, in_bytes, whole
from reprise.format.layout import TensorKind, TensorSpec
from reprise.loading.target import Target
from reprise.tensors.live import LiveTensor

VALUES = torch.arange(24, dtype=torch.float32).reshape(4, 6)


def target_of(local: torch.Tensor, box: Box, *, written: Box | None = None) -> Target:
    spec = TensorSpec(TensorKind.MODEL, "t", (8, 9), local.dtype, (8, 9))
    return Target(LiveTensor(spec, box, local, (0,)), written or box)


def bytes_of(values: torch.Tensor) -> np.ndarray:
    packed = values.contiguous()
    return packed.reshape(-1).view(torch.uint8).numpy().reshape(*values.shape, packed.element_size())


LAYOUTS = [
    torch.zeros(4, 6),
    torch.zeros(6, 4).T,
    torch.zeros(4, 12)[:, ::2],
    torch.zeros(9, 8)[3:7, 1:7],
]


@pytest.mark.parametrize("local", LAYOUTS, ids=["packed", "transposed", "every other", "inner"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_parts_that_are_put_are_in_the_live_tensor(local: torch.Tensor, dtype: torch.dtype) -> None:
    local, values = local.to(dtype), VALUES.to(dtype)
    box = Box((2, 3), (4, 6))
    target = target_of(local, box)
    for part in (Box((2, 3), (4, 2)), Box((2, 5), (1, 4)), Box((3, 5), (3, 4))):
        inner = tuple(slice(o - b, o - b + n) for o, b, n in zip(part.offset, box.offset, part.shape, strict=True))
        target.put(in_bytes(part, dtype.itemsize), bytes_of(values[inner]))
    target.finish()
    assert torch.equal(local, values)


def test_memory_is_given_where_a_part_is_packed_in_it() -> None:
    target = target_of(torch.zeros(4, 6), Box((2, 3), (4, 6)))
    rows = target.memory(in_bytes(Box((3, 3), (2, 6)), 4))
    assert rows is not None
    rows[:] = bytes_of(VALUES[1:3]).reshape(-1)
    assert torch.equal(target.tensor.local[1:3], VALUES[1:3])
    assert not target.tensor.local[0].any()
    assert target.memory(in_bytes(Box((3, 3), (2, 5)), 4)) is None
    assert target_of(torch.zeros(6, 4).T, Box((0, 0), (4, 6))).memory(in_bytes(whole((4, 6)), 4)) is None


def test_a_scalar_and_a_shard_of_a_storage_are_filled_in_place() -> None:
    storage = torch.zeros(10)
    target = target_of(storage[3], whole(()))
    memory = target.memory(in_bytes(whole(()), 4))
    assert memory is not None
    memory[:] = bytes_of(torch.tensor(2.5)).reshape(-1)
    assert storage.tolist() == [0, 0, 0, 2.5, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("local", LAYOUTS[:2], ids=["packed", "transposed"])
def test_a_tensor_of_other_dimensions_is_there_when_finished(local: torch.Tensor) -> None:
    local = local.clone()
    target = target_of(local, whole((4, 6)), written=whole((4, 2, 3)))
    target.put(in_bytes(whole((4, 2, 3)), 4), bytes_of(VALUES.reshape(4, 2, 3)))
    target.finish()
    assert torch.equal(local, VALUES)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("local", LAYOUTS, ids=["packed", "transposed", "every other", "inner"])
def test_parts_that_are_put_are_in_a_tensor_on_a_device(local: torch.Tensor) -> None:
    there = torch.empty_strided(local.shape, local.stride(), device="cuda").zero_()
    target = target_of(there, whole((4, 6)))
    assert target.memory(in_bytes(whole((4, 6)), 4)) is None
    target.put(in_bytes(Box((0, 0), (4, 2)), 4), bytes_of(VALUES[:, :2]))
    target.put(in_bytes(Box((0, 2), (4, 4)), 4), bytes_of(VALUES[:, 2:]))
    target.finish()
    torch.cuda.synchronize()
    assert torch.equal(there.cpu(), VALUES)
