"""What each rank has of its own: random state, positions, objects; on two ranks, and loaded on one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from reprise import AsyncSaver, load, load_state_dict, save, save_state_dict
from reprise.errors import MismatchError
from reprise.nested.calls import _known
from tests.distributed.programs import Outcome, refused, run_programs


class Position:
    """A sampler's position, with a tensor of its generator."""

    def __init__(self, at: int) -> None:
        self.state: dict[str, Any] = {"at": at, "generator": torch.full((3,), at)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def draws() -> list[float]:
    return [random.random(), *torch.rand(2).tolist()]


def go_on(folder: Path, rank: int) -> None:
    """Save twice in the background, load, and see that each rank has its own back."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    torch.manual_seed(rank)
    random.seed(rank)
    position, expected = Position(10 + rank), {}
    with AsyncSaver(folder / "saves") as saver:
        for iteration in (1, 2):
            position.state["at"] += 1
            saver.save(iteration, model, per_rank={"position": position, "seen": [rank] * iteration}, rng=True)
            expected = {"at": position.state["at"], "draws": draws()}
    target, own = Position(0), {"seen": [0]}
    load(folder / "saves", model, per_rank=own | {"position": target}, rng="if_same_ranks")
    assert (target.state["at"], draws()) == (expected["at"], expected["draws"])
    assert target.state["generator"].tolist() == [10 + rank] * 3
    load(folder / "saves", model, per_rank=(given := {"seen": [0], "position": Position(0)}), strict=False)
    assert given["seen"] == [rank, rank]
    assert load(folder / "saves", model) == {"iteration": 2}
    assert load(folder / "none", model, per_rank=own, missing_ok=True) == {"iteration": 0}
    assert own == {"seen": [0]}


class Application:
    """A program's state as one object, as DCP's tutorial has it: shards of FSDP2, and a plain tensor."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model, self.plain = nn.Linear(4, 6), torch.full((2,), float(seed))
        fully_shard(self.model)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "plain": self.plain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert all(state["model"][name] is not None for name in ("weight", "bias"))
        self.model.load_state_dict(state["model"])
        self.plain = state["plain"]


def shard(folder: Path, _: int) -> None:
    """Save shards in an object and in modules of `state`, and load them into others."""
    application, other = Application(1), Application(2)
    save(folder, application.model, iteration=1, state={"app": application, "ema": Application(3).model})
    ema = Application(4)
    load(folder, other.model, state={"app": other, "ema": ema.model})
    for loaded, saved in ((other, application), (ema, Application(3))):
        for name, value in loaded.model.state_dict().items():
            assert torch.equal(value.to_local(), saved.model.state_dict()[name].to_local()), name
    assert other.plain.tolist() == [1.0, 1.0]
    assert load(folder, other.model) == {"iteration": 1}
    save_state_dict(folder, {"app": application}, iteration=2)
    load_state_dict(folder, {"app": ema})
    assert torch.equal(ema.model.weight.to_local(), application.model.weight.to_local())


def disagree(folder: Path, rank: int) -> None:
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    refused(lambda: save(folder, model, iteration=1, state={"sampler": Position(rank)}))
    refused(lambda: save(folder, model, iteration=1, state={"long": [rank] * 1000}))
    refused(lambda: save(folder, model, iteration=1, state={"draw": torch.tensor(rank)}))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Return what became of each program; the programs themselves check what they load."""
    return run_programs([go_on, shard, disagree], tmp_path_factory.mktemp("per_rank"))


def test_each_rank_has_its_own_back(outcomes: dict[str, Outcome], caplog: pytest.LogCaptureFixture) -> None:
    saves = outcomes["go_on"].folder / "saves"
    _known.clear()
    model, random_state = nn.Linear(2, 2), torch.get_rng_state()
    assert load(saves, model, rng="if_same_ranks", iteration=1) == {"iteration": 1}
    own, rest = caplog.messages
    assert own == f"random state not loaded from {saves / 'iter_0000001'}: saved on 2 ranks, loaded on 1"
    assert "position" in rest
    assert "random state" not in rest
    assert torch.equal(torch.get_rng_state(), random_state)
    with pytest.raises(MismatchError, match=r"expected 1 rank, .*found 2 ranks"):
        load(saves, nn.Linear(2, 2), rng=True)
    assert load(saves, nn.Linear(2, 2)) == {"iteration": 2}


def test_shards_in_objects_are_filled_in_place(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["shard"].committed == ["iter_0000001", "iter_0000002"]


def test_objects_that_differ_by_rank_are_refused_by_name(outcomes: dict[str, Outcome]) -> None:
    for lines in outcomes["disagree"].refusals():
        assert [about in line for about, line in zip(("/sampler", "/long", "/draw"), lines, strict=True)] == [True] * 3
        assert all(len(line) < 1200 for line in lines)
        assert sum("`per_rank`" in line for line in lines) == 2
    assert outcomes["disagree"].committed == []
