"""Versions of tensors rise with a load, and tensors of the library's own ignore the modes of the caller."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from reprise import AsyncSaver, RandomState, load, load_state_dict, save, save_state_dict


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    """Set torch's default device for the time of a test."""
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def lone_group() -> Iterator[None]:
    """Join a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


Mode = Callable[[], AbstractContextManager[Any]]
MODES: dict[str, Mode] = {
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "default device": lambda: default_device("meta"),
    "device": lambda: torch.device("meta"),
}
in_each_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


def made(seed: int, *, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a trained model and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.register_parameter("phase", nn.Parameter(torch.randn(2, dtype=torch.complex64)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer, steps)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(5, 3).cumsum(0)).square().sum().backward()
        optimizer.step()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


@in_each_mode
def test_what_is_loaded_in_a_mode_can_be_trained(tmp_path: Path, mode: Mode) -> None:
    """Parameters, tensors of the caller and those that the load makes: moments and unknown tensors."""
    model, optimizer = made(1, steps=2)
    phase = torch.ones(2, dtype=torch.complex64).conj()
    state = {"buffer": torch.arange(3.0), "rng": RandomState(), "phase": phase, "new": torch.ones(2)}
    with mode():
        save(tmp_path, model, optimizer, iteration=1, state=state, rng=True)
    step(model, optimizer, 2)
    target, fresh = made(2, steps=0)
    template = {"buffer": torch.zeros(3), "rng": RandomState(), "phase": torch.zeros_like(phase).conj()}
    with mode():
        loaded = load(tmp_path, target, fresh, state=template, rng=True)
    step(target, fresh, 2)
    assert all(map(torch.equal, weights(target), weights(model)))
    loaded["new"].requires_grad_().sum().backward()


@in_each_mode
def test_saves_in_and_out_of_a_mode_share_memory(tmp_path: Path, mode: Mode) -> None:
    model, optimizer = made(1, steps=1)
    with AsyncSaver(tmp_path) as saver:
        for iteration in range(4):
            state = {"copied": torch.ones(2, 3).T + iteration}
            with mode() if iteration % 2 == 0 else contextlib.nullcontext():
                saver.save(iteration, model, optimizer, state=state)
    for iteration in range(4):
        loaded = load(tmp_path / f"iter_{iteration:07d}", *made(2, steps=0), state={"copied": torch.zeros(3, 2)})
        assert loaded["copied"].unique().tolist() == [1.0 + iteration]


def test_tensors_made_in_inference_are_filled(tmp_path: Path) -> None:
    path = save_state_dict(tmp_path, {"a": torch.arange(6.0).reshape(2, 3), "b": torch.full((3,), 2.0)}, iteration=1)
    with torch.inference_mode():
        target = {"a": torch.zeros(3, 2).T, "b": torch.zeros(1).expand(3)}
    for mode in MODES.values():
        for tensor in target.values():
            with torch.inference_mode():
                tensor[:1].zero_()
        with mode():
            load_state_dict(path, target)
        assert target["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert target["b"].tolist() == [2, 2, 2]


LEAF = torch.ones(3, requires_grad=True)
KINDS: dict[str, tuple[torch.Tensor, ...]] = {
    "tied": (LEAF, nn.Parameter(LEAF.data)),
    "columns": (torch.ones(2, 3).T,),
    "complex": (torch.ones(3, dtype=torch.complex64),),
    "conjugate": (torch.ones(3, dtype=torch.complex64).conj(),),
    "expanded": (torch.ones(1).expand(3),),
    "float8": (torch.ones(3).to(torch.float8_e8m0fnu),),
    "slice": (torch.ones(4)[1:],),
}


@pytest.mark.parametrize("kind", KINDS)
def test_versions_of_every_kind_of_tensor_rise(tmp_path: Path, kind: str) -> None:
    """So that autograd refuses a backward pass through a graph made before the load."""
    state = dict(zip("ab", KINDS[kind], strict=False))
    path = save_state_dict(tmp_path, state, iteration=1)
    versions = [tensor._version for tensor in state.values()]
    load_state_dict(path, state)
    assert all(tensor._version > before for tensor, before in zip(state.values(), versions, strict=True))


def test_shards_are_filled_and_their_versions_rise(tmp_path: Path) -> None:
    with lone_group():
        mesh = init_device_mesh("cpu", (1,))
        model = parallelize_module(nn.Sequential(nn.Linear(3, 4)), mesh, {"0": ColwiseParallel()})
        save(tmp_path, model, iteration=1)
        loss = model(torch.ones(2, 3, requires_grad=True)).square().sum()
        load(tmp_path, model)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        path = save_state_dict(tmp_path, {"a": torch.arange(3.0)}, iteration=2)
        target = {"a": distribute_tensor(torch.zeros(3), mesh, [Replicate()])}
        with torch.inference_mode():
            load_state_dict(path, target)
            save_state_dict(tmp_path, target, iteration=3)
        assert target["a"].full_tensor().tolist() == [0, 1, 2]
