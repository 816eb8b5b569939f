"""What cannot be plain bytes on disk is refused by name, at save and at load."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from reprise import load, save
from reprise.errors import CheckpointError
from reprise.tensors import live
from reprise.tensors.file_form import _may_overlap_itself
from reprise.tensors.live import Grid, check_disjoint, live_tensors
from tests.messages import refused


def holder(**tensors: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(name, tensor)
        else:
            module.register_buffer(name, tensor)
    return module


def quantised() -> torch.Tensor:
    return torch._empty_affine_quantized([3], scale=1.0, zero_point=0, dtype=torch.qint8)


WEIGHT = torch.arange(12.0).reshape(4, 3)
REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "sparse": (lambda: holder(adjacency=torch.eye(3).to_sparse()), ("adjacency", "sparse")),
    "quantised": (lambda: holder(packed=quantised()), ("packed", "quantized")),
    "rows": (lambda: holder(w=nn.Parameter(WEIGHT), top=WEIGHT[:2]), ("top and w",)),
    "one element": (lambda: holder(w=nn.Parameter(WEIGHT), last=WEIGHT[3, 2]), ("last and w",)),
    "other dtype": (lambda: holder(w=nn.Parameter(WEIGHT), raw=WEIGHT.view(torch.int32)[2]), ("raw and w",)),
    "crossing": (lambda: holder(row=WEIGHT[1], column=WEIGHT[:, 1]), ("column and row",)),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", REFUSED)
def test_memory_not_a_tensor_s_own_is_refused_at_save_and_load(tmp_path: Path, name: str) -> None:
    make, words = REFUSED[name]
    with refused(CheckpointError, *words):
        save(tmp_path, make(), iteration=1)
    assert list(tmp_path.glob("iter_*")) == []
    plain = {n: torch.zeros(t.shape, dtype=torch.float32) for n, t in make().state_dict().items()}
    save(tmp_path, holder(**plain), iteration=1)
    with refused(CheckpointError, *words):
        load(tmp_path, make())


def test_parts_of_one_memory_that_do_not_meet_are_stored(tmp_path: Path) -> None:
    def module(memory: torch.Tensor) -> nn.Module:
        tied = nn.Parameter(torch.full((3, 2), float(memory[0, 0])).T)
        inner = {"left": memory[:, :1], "right": memory[:, 1:].T, "none": memory[:, :0], "scalar": torch.tensor(1)}
        model = holder(**{name: nn.Parameter(t, requires_grad=False) for name, t in inner.items()}, tied=tied)
        model.other = tied
        return model

    source, target = module(WEIGHT + 1), module(torch.zeros(4, 3))
    save(tmp_path, source, iteration=1)
    load(tmp_path, target)
    for name, value in source.state_dict().items():
        assert torch.equal(value, target.state_dict()[name])


def test_a_tied_tensor_has_its_first_name() -> None:
    model = holder(w=nn.Parameter(WEIGHT), b=torch.ones(1))
    model.again = model.w
    assert [tensor.spec.name for tensor in live_tensors(model, None, grid=Grid.flat(1))] == ["w", "b"]


def test_a_big_endian_host_neither_saves_nor_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(ImportError, match="little-endian"):
        importlib.reload(live)


MEMORY = torch.zeros(64)
PARTS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6)), max_size=3)


def part(dims: list[tuple[int, int]], offset: int) -> torch.Tensor:
    return MEMORY.as_strided([size for size, _ in dims], [stride for _, stride in dims], offset)


def addresses(tensor: torch.Tensor) -> list[int]:
    steps = [
        [index * int(stride) for index in range(n)] for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return [int(tensor.storage_offset()) + sum(at) for at in itertools.product(*steps)]


@given(PARTS, PARTS, st.integers(0, 9))
def test_memory_needs_a_place_of_its_own_for_every_element(
    first: list[tuple[int, int]], second: list[tuple[int, int]], offset: int
) -> None:
    a, b = part(first, 0), part(second, offset)
    if _may_overlap_itself(a) or _may_overlap_itself(b):
        return
    for tensor in (a, b):
        assert len(set(addresses(tensor))) == tensor.numel()
    if set(addresses(a)) & set(addresses(b)):
        with pytest.raises(CheckpointError, match=r"a and b"):
            check_disjoint([("a", a), ("b", b)])
    else:
        check_disjoint([("a", a), ("b", b)])


@given(st.permutations(range(3)), st.integers(0, 1), st.integers(1, 4))
def test_a_slice_of_any_permuted_tensor_needs_no_copy(order: list[int], lo: int, step: int) -> None:
    assert not _may_overlap_itself(torch.zeros(3, 4, 5).permute(order)[lo:, ::step])
