"""Tensors whose memory, sign or dtype is not that of a file: equal in bits and dtype after a save and a load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from reprise import load, load_state_dict, save, save_state_dict
from reprise.errors import CheckpointError, MismatchError, PartialLoadError
from reprise.format import Box
from tests.messages import refused
from tests.states import Holding


def numbers(dtype: torch.dtype = torch.float32, *, fill: int = 0) -> torch.Tensor:
    raw = (torch.arange(fill, fill + 64) % 251).to(torch.uint8)
    return raw.view(dtype).clone()


def complex_numbers(fill: int) -> torch.Tensor:
    return torch.complex(torch.arange(6.0) + fill, -torch.arange(6.0)).reshape(2, 3)


Maker = Callable[[int], torch.Tensor]
KINDS: dict[str, Maker] = {
    "negative": lambda fill: torch._neg_view(torch.arange(6.0) + fill),
    "transposed conjugate": lambda fill: complex_numbers(fill).mH,
    "complex": complex_numbers,
    "complex128": lambda fill: complex_numbers(fill).to(torch.complex128)[:, ::2],
    "complex32": lambda fill: complex_numbers(fill).to(torch.complex32),
    "no complex numbers": lambda fill: torch.zeros(0, 3, dtype=torch.complex64),
    "e5m2fnuz": lambda fill: numbers(torch.float8_e5m2fnuz, fill=fill).reshape(8, 8).T,
    "e8m0fnu": lambda fill: numbers(torch.float8_e8m0fnu, fill=fill),
    "e2m1": lambda fill: numbers(torch.uint8, fill=fill).view(torch.float4_e2m1fn_x2),
    "expanded": lambda fill: torch.full((1, 3), float(fill)).expand(4, 3),
    "expanded scalar": lambda fill: torch.tensor(fill).expand(2, 5),
    "columns": lambda fill: (torch.arange(12.0) + fill).reshape(3, 4)[:, 1::2],
}


def bits(tensor: torch.Tensor) -> bytes:
    packed = tensor.resolve_neg().resolve_conj().contiguous().reshape(-1)
    return (
        torch.view_as_real(packed).numpy().tobytes()
        if packed.is_complex()
        else packed.view(torch.uint8).numpy().tobytes()
    )


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert bits(found) == bits(expected)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_any_kind_is_carried(tmp_path: Path, kind: str) -> None:
    """In a state dict, as a buffer, and in the state of an object."""
    make = KINDS[kind]
    path = save_state_dict(tmp_path / "nested", {"a": make(3), "model": {"w": make(5)}}, iteration=1)
    target, inner = make(0), {"w": make(0)}
    state = {"a": target, "model": inner}
    load_state_dict(path, state)
    assert state["a"] is target
    assert_equal(target, make(3))
    assert_equal(inner["w"], make(5))
    holders = [nn.Module(), nn.Module()]
    for number, holder in enumerate(holders):
        holder.register_buffer("b", make(number))
    path = save(tmp_path, holders[0], iteration=1, state={"s": Holding(make(3)), "t": make(4)})
    held = Holding(make(0))
    assert_equal(load(path, holders[1], state={"s": held})["t"], make(4))
    assert_equal(holders[1].b, make(0))
    assert_equal(held.tensor, make(3))


def test_moments_of_complex_parameters_are_made(tmp_path: Path) -> None:
    def trained(steps: int) -> tuple[nn.ParameterDict, torch.optim.Optimizer]:
        model = nn.ParameterDict({"w": nn.Parameter(complex_numbers(1))})
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(steps):
            (model["w"] * complex(1, 2)).abs().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    model, optimizer = trained(2)
    again, opt = trained(0)
    load(save(tmp_path, model, optimizer, iteration=2), again, opt)
    for key, value in optimizer.state[model["w"]].items():
        assert_equal(opt.state[again["w"]][key], value)
    assert_equal(again["w"].detach(), model["w"].detach())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.zeros(3, dtype=torch.complex64), torch.zeros(3, 2)),
        (numbers(torch.float8_e5m2fnuz), numbers(torch.uint8)),
    ],
)
def test_another_dtype_of_the_same_bytes_is_refused(tmp_path: Path, first: torch.Tensor, second: torch.Tensor) -> None:
    path = save_state_dict(tmp_path, {"a": first}, iteration=1)
    before = bits(second)
    names = [str(tensor.dtype).removeprefix("torch.") for tensor in (second, first)]
    for strict in (True, False):
        with refused(MismatchError, "/a", *names):
            load_state_dict(path, {"a": second}, strict=strict)
    assert bits(second) == before


def test_an_expanded_tensor_holds_one_value_for_its_elements(tmp_path: Path) -> None:
    path = save_state_dict(tmp_path, {"a": torch.arange(3.0)}, iteration=1)
    with refused(PartialLoadError, "/a"):
        load_state_dict(path, {"a": torch.zeros(1).expand(3)})
    load_state_dict(path, state := {"a": torch.zeros(3)})
    assert state["a"].tolist() == [0, 1, 2]


def test_overlapping_windows_keep_their_values_or_are_refused(tmp_path: Path) -> None:
    path = save_state_dict(tmp_path, {"a": torch.arange(9.0).unfold(0, 4, 2)}, iteration=1)
    load_state_dict(path, state := {"a": torch.zeros(9).unfold(0, 4, 2)})
    assert state["a"].tolist() == torch.arange(9.0).unfold(0, 4, 2).tolist()
    path = save_state_dict(tmp_path, {"a": torch.arange(12.0).reshape(3, 4)}, iteration=2)
    with refused(PartialLoadError, "/a"):
        load_state_dict(path, state)


@pytest.mark.parametrize(
    ("make", "name"),
    [(lambda: nn.LazyLinear(2), "weight"), (lambda: nn.LazyBatchNorm1d(affine=False), "running_mean")],
    ids=["parameter", "buffer"],
)
def test_lazy_tensors_are_refused_by_name(tmp_path: Path, make: Callable[[], nn.Module], name: str) -> None:
    model, path = nn.Sequential(make()), save(tmp_path / "plain", nn.Linear(4, 2), iteration=1)
    for call in (lambda: save(tmp_path, model, iteration=1), lambda: load(path, model)):
        with refused(CheckpointError, f"/model/0.{name}"):
            call()


def placed(local: torch.Tensor, offsets: list[tuple[int, ...]], *parts: Box) -> torch.Tensor:
    """Describe `parts` of a local tensor as shards of a tensor of [4, 6], as torch's CheckpointableTensor."""
    place = ((4, 6), offsets, [part.offset for part in parts], [part.shape for part in parts])
    for name, value in zip(("global_shape", "global_offsets", "local_offsets", "local_sizes"), place, strict=True):
        setattr(local, name, value)
    return local


@pytest.mark.parametrize(
    ("offsets", "parts"),
    [
        ([(0, 0)], [Box((1, 2), (4, 6))]),
        ([(2, 0), (0, 0)], [Box((0, 0), (2, 6)), Box((3, 1), (2, 6))]),
    ],
    ids=["padded", "two_parts"],
)
def test_a_tensor_that_describes_its_shards_is_carried(
    tmp_path: Path, offsets: list[tuple[int, int]], parts: list[Box]
) -> None:
    numbers = torch.arange(24.0).reshape(4, 6)
    for whole in (numbers, torch.complex(numbers, -numbers)):
        local, again = torch.full((5, 8), -1.0, dtype=whole.dtype), torch.full((5, 8), -1.0, dtype=whole.dtype)
        for offset, part in zip(offsets, parts, strict=True):
            local[part.slices] = whole[Box(offset, part.shape).slices]
        path = save_state_dict(tmp_path / str(whole.dtype), {"x": placed(local, offsets, *parts)}, iteration=1)
        plain = {"x": torch.zeros_like(whole)}
        load_state_dict(path, plain)
        assert torch.equal(plain["x"], whole)
        load_state_dict(path, {"x": placed(again, offsets, *parts)})
        assert torch.equal(again, local)


def test_moments_are_placed_as_their_parameter(tmp_path: Path) -> None:
    part = Box((1, 2), (4, 6))
    models = [nn.ParameterDict({"x": torch.rand(5, 8)}), nn.ParameterDict({"x": torch.rand(5, 8)})]
    first, second = ((model, torch.optim.AdamW(model.parameters())) for model in models)
    for model, optimizer in (first, second):
        placed(model["x"], [(0, 0)], part)
        model["x"].sum().backward()
        optimizer.step()
    whole = nn.ParameterDict({"x": torch.zeros(4, 6)})
    path, optimizer = save(tmp_path, *first, iteration=1), torch.optim.AdamW(whole.parameters())
    load(path, whole, optimizer)
    assert torch.equal(whole["x"], first[0]["x"][part.slices])
    moments = first[1].state[first[0]["x"]]
    assert torch.equal(optimizer.state[whole["x"]]["exp_avg"], moments["exp_avg"][part.slices])
    second[1].state.clear()
    load(path, *second)
    loaded = second[1].state[second[0]["x"]]
    assert all(torch.equal(loaded[key][part.slices], moments[key][part.slices]) for key in ("exp_avg", "exp_avg_sq"))


def test_an_object_keeps_the_shards_that_it_describes(tmp_path: Path) -> None:
    part = Box((1, 2), (4, 6))
    local, current = (placed(torch.rand(5, 8), [(0, 0)], part) for _ in range(2))
    again = Holding(current)
    load_state_dict(save_state_dict(tmp_path, {"x": Holding(local)}, iteration=1), {"x": again})
    assert again.tensor.data_ptr() == current.data_ptr()
    assert torch.equal(again.tensor[part.slices], local[part.slices])


def test_torch_carries_the_same_shards(tmp_path: Path) -> None:
    protocol = pytest.importorskip("torch.distributed.checkpoint.protocol", reason="new in torch 2.14")
    whole, parts = torch.rand(4, 6), [Box((0, 0), (2, 6)), Box((3, 1), (2, 6))]
    local = placed(torch.zeros(5, 8), [(2, 0), (0, 0)], *parts)
    assert isinstance(local, protocol.CheckpointableTensor)
    load_state_dict(save_state_dict(tmp_path / "ours", {"x": whole}, iteration=1), {"x": local})
    dcp.save({"x": local}, checkpoint_id=tmp_path / "torch", no_dist=True)
    plain = {"x": torch.zeros(4, 6)}
    dcp.load(plain, checkpoint_id=tmp_path / "torch", no_dist=True)
    assert torch.equal(plain["x"], whole)


@pytest.mark.parametrize("offsets", [[(0, 0), (2, 0)], [(0, 0, 0)]], ids=["shards", "dimensions"])
def test_a_description_that_contradicts_itself_is_refused(tmp_path: Path, offsets: list[tuple[int, ...]]) -> None:
    local = placed(torch.zeros(4, 6), offsets, Box((0, 0), (4, 6)))
    with refused(CheckpointError, "(/x)", "global_offsets"):
        save_state_dict(tmp_path, {"x": local}, iteration=1)


@pytest.mark.parametrize("second", [(0, 3), (3, 0)], ids=["overlap", "gap"])
def test_shards_that_are_not_a_box_are_refused(tmp_path: Path, second: tuple[int, int]) -> None:
    local = placed(torch.zeros(4, 6), [(0, 0), second], Box((0, 0), (2, 4)), Box((2, 0), (1, 2)))
    with refused(CheckpointError, "(/x)"):
        save_state_dict(tmp_path, {"x": local}, iteration=1)
