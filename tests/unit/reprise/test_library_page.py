"""Sentences of docs/library.md that no test of a module shows."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from reprise import AsyncSaver, RandomState, load, load_state_dict, save, save_state_dict
from reprise.errors import MismatchError
from reprise.saving.snapshot import Snapshot


def trained(seed: int, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.usefixtures("one_rank")
def test_ddp_adds_a_prefix_and_its_module_has_none(tmp_path: Path) -> None:
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    path = save(tmp_path / "wrapped", wrapped, iteration=1)
    with pytest.raises(MismatchError, match=r"module\.weight is unexpected"):
        load(path, nn.Linear(2, 2))
    path = save(tmp_path / "module", wrapped.module, iteration=1)
    load(path, plain := nn.Linear(2, 2))
    assert torch.equal(plain.weight, wrapped.module.weight)


def test_dicts_of_torch_have_live_tensors_and_copied_numbers(tmp_path: Path) -> None:
    model, optimizer = trained(0, lr=0.5)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    save_state_dict(tmp_path, state, iteration=1)
    other, again = trained(1, lr=0.1)
    state = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, again)}
    load_state_dict(tmp_path, state)
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(again.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert again.param_groups[0]["lr"] == 0.1
    set_optimizer_state_dict(other, again, state["optimizer"])
    assert again.param_groups[0]["lr"] == 0.5


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_given", [False, True])
def test_a_dict_from_before_a_forward_pass_needs_the_model(tmp_path: Path, is_given: bool) -> None:
    source, model = fully_shard(trained(0, 0.1)[0]), fully_shard(trained(1, 0.1)[0])
    save_state_dict(tmp_path, {"model": get_model_state_dict(source)}, iteration=1)
    state = {"model": get_model_state_dict(model)}
    with torch.no_grad():
        model(torch.ones(2))
        load_state_dict(tmp_path, state, model=model if is_given else None)
        assert torch.equal(model(torch.ones(2)), source(torch.ones(2))) == is_given


def test_a_load_is_about_the_outermost_keys_that_are_given(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": {"w": torch.ones(2)}, "ema": {"w": torch.ones(3)}, "epoch": 3}
    save_state_dict(tmp_path, state, iteration=1)
    load_state_dict(tmp_path, part := {"model": {"w": torch.zeros(2)}})
    assert torch.equal(part["model"]["w"], torch.ones(2))
    with pytest.raises(MismatchError, match="ema/w has shape"):
        load_state_dict(tmp_path, {"ema": {"w": torch.zeros(2)}}, strict=False)


def test_random_state_lies_in_a_state_dict_too(tmp_path: Path) -> None:
    torch.manual_seed(3)
    save_state_dict(tmp_path, {"rng": {"0": RandomState()}}, iteration=1)
    expected = torch.rand(2)
    load_state_dict(tmp_path, {"rng": {"0": RandomState()}})
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("count", [1, 3])
def test_as_many_threads_copy_as_torch_computes_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    stage_all, threads, barrier = Snapshot._stage_all, set(), threading.Barrier(count, timeout=60)

    def stage(snapshot: Snapshot, share: Any) -> None:
        barrier.wait()
        threads.add(threading.get_ident())
        stage_all(snapshot, share)

    monkeypatch.setattr("torch.get_num_threads", lambda: count)
    state = {"w": torch.ones(9)}
    with AsyncSaver(tmp_path) as saver:
        saver.save_state_dict(1, state)
        monkeypatch.setattr(Snapshot, "_stage_all", stage)
        saver.save_state_dict(2, state)
    assert len(threads) == count
