"""Version 1 of the format stays readable, and the same state stays the same files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from reprise import load, load_state_dict, save_state_dict
from reprise.loading.choose import LoadSource
from reprise.loading.restorer import Restorer
from reprise.ranks.channel import StoreChannel
from reprise.tensors.live import LiveTensor
from tests.fakes import SHARDINGS, Sharding, all_ranks, bits
from tests.golden import make, make_state_dict
from tests.harness import tensor_files
from tests.states import assert_same

GOLDEN = Path(make.__file__).parent / "format1" / "iter_0000007"
STATE_DICT = GOLDEN.parents[1] / "format1_state_dict" / GOLDEN.name
VALUES = make.values()


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value) for name, value in VALUES.items()}


@pytest.mark.parametrize(
    "sharding",
    [
        pytest.param(sharding, id=sharding.name, marks=() if number in (0, 7, 9) else pytest.mark.slow)
        for number, sharding in enumerate(SHARDINGS)
    ],
)
def test_format_1_loads_bitwise_at_every_sharding(sharding: Sharding) -> None:
    def call(channel: StoreChannel) -> list[LiveTensor]:
        target = sharding.live(channel.rank, make.specs(), zeros())
        restorer = Restorer(channel, nonce="n")
        checkpoint = restorer.restore(LoadSource(GOLDEN), check=lambda _: None, live=lambda _: target).checkpoint
        assert checkpoint.state == make.DOCUMENT
        return target

    for rank, parts in enumerate(all_ranks(sharding.world_size, call)):
        for part, expected in zip(parts, sharding.live(rank, make.specs(), VALUES), strict=True):
            assert bits(part.local) == bits(expected.local), part.spec.name


@pytest.mark.parametrize("sharding", [make.SHARDING, SHARDINGS[0]], ids=lambda sharding: sharding.name)
def test_the_same_state_is_written_to_the_same_bytes(tmp_path: Path, sharding: Sharding) -> None:
    assert tensor_files(make.write(tmp_path, sharding)) == tensor_files(GOLDEN)


class Net(nn.Module):
    """The model whose state the golden checkpoint is; it knows nothing of how `attn.weight` was cut."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in make.PARAMETERS.items():
            module = nn.Module()
            module.weight = nn.Parameter(torch.zeros(shape))
            self.add_module(name.removesuffix(".weight"), module)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.get_parameter("embed.weight")
        for name, (shape, dtype) in make.BUFFERS.items():
            owner, _, leaf = name.rpartition(".")
            self.get_submodule(owner).register_buffer(leaf, torch.zeros(shape, dtype=dtype))


def test_format_1_loads_into_any_model_and_its_optimizer() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    assert load(GOLDEN, model, optimizer) == {**make.USER, "iteration": make.ITERATION}
    found = dict(model.state_dict())
    assert bits(found.pop("head.weight")) == bits(VALUES["embed.weight"])
    for name, parameter in model.named_parameters():
        found |= {f"{key}.{name}": value for key, value in optimizer.state[parameter].items()}
    assert {name: bits(value) for name, value in found.items()} == {n: bits(value) for n, value in VALUES.items()}
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.25, (0.5, 0.75), 0.125)


def test_the_golden_state_dict_loads_in_place() -> None:
    found = make_state_dict.state_dict(scale=2)
    assert load_state_dict(STATE_DICT, found) == {"iteration": make_state_dict.ITERATION}
    assert_same(make_state_dict.state_dict(), found)


def test_the_golden_state_dict_is_written_as_it_was(tmp_path: Path) -> None:
    path = save_state_dict(tmp_path, make_state_dict.state_dict(), iteration=make_state_dict.ITERATION)
    assert len(tensor_files(path)) == 3
    assert tensor_files(path) == tensor_files(STATE_DICT)
    for name in ("trainer_state.json", "model.safetensors.index.json"):
        assert (path / name).read_bytes() == (STATE_DICT / name).read_bytes()
