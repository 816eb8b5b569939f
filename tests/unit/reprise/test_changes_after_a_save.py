"""Programs that change tensors while a background save is under way: it holds what was there at the call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from reprise import AsyncSaver, latest, load, save
from reprise.saving.snapshot import Snapshot
from tests.unit.reprise.saving.test_background import Gate


class Model(nn.Module):
    """A model whose tensors change in many ways: in the forward pass, by hand, and in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6, max_norm=0.5)
        self.norm = nn.BatchNorm1d(6)
        self.query, self.key, self.average = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return [batch, 6] for [batch]; moves the key encoder toward the query's, as MoCo does."""
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                key.mul_(0.9).add_(query + 1, alpha=0.1)
        out: torch.Tensor = self.query(self.norm(self.embedding(tokens)))
        return out + self.key(out).detach()


class Program:
    """A model and its optimizer, of which every tensor holds one value."""

    def __init__(self, fill: float, folder: Path) -> None:
        torch.manual_seed(1)
        self.model, self.folder = Model(), folder
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        for tensor in self.tensors().values():
            tensor.fill_(fill)

    def tensors(self) -> dict[str, torch.Tensor]:
        moments = {
            f"{key}.{number}": tensor
            for number, values in enumerate(self.optimizer.state.values())
            for key, tensor in values.items()
        }
        return {**{name: tensor.detach() for name, tensor in self.model.state_dict().items()}, **moments}


def run_forward(program: Program) -> None:
    program.model(torch.arange(7))


def average_by_hand(program: Program) -> None:
    for average, query in zip(program.model.average.parameters(), program.model.query.parameters(), strict=True):
        average.data.lerp_(query.data + 1, 0.1)


def clip_weights(program: Program) -> None:
    for parameter in program.model.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def copy_into_a_module(program: Program) -> None:
    program.model.load_state_dict(Program(4.0, program.folder).model.state_dict())


def roll_back(program: Program) -> None:
    load(program.folder / "older", program.model, program.optimizer)


def step(program: Program) -> None:
    program.optimizer.step()


CHANGES: dict[str, tuple[Callable[[Program], None], list[str]]] = {
    "forward": (run_forward, ["embedding.weight", "key.weight", "key.bias", "norm.running_mean"]),
    "average": (average_by_hand, ["average.weight", "average.bias"]),
    "clip": (clip_weights, ["embedding.weight", "query.weight"]),
    "copy": (copy_into_a_module, ["embedding.weight", "query.weight", "norm.num_batches_tracked"]),
    "load": (roll_back, ["embedding.weight", "query.weight", "exp_avg.0", "step.0"]),
    "step": (step, ["embedding.weight", "query.weight", "exp_avg.0", "step.0"]),
}


def save_model(saver: AsyncSaver, program: Program) -> None:
    saver.save(1, program.model, program.optimizer)


def save_nested(saver: AsyncSaver, program: Program) -> None:
    optimizer = get_optimizer_state_dict(program.model, program.optimizer)
    saver.save_state_dict(1, {"model": get_model_state_dict(program.model), "optimizer": optimizer})


@pytest.mark.parametrize("way", [save_model, save_nested])
@pytest.mark.parametrize(("change", "changed"), CHANGES.values(), ids=CHANGES.keys())
def test_a_change_after_the_call_is_not_saved(
    tmp_path: Path,
    way: Callable[[AsyncSaver, Program], None],
    change: Callable[[Program], None],
    changed: list[str],
) -> None:
    program, gate = Program(2.0, tmp_path), Gate(0)
    other = Program(5.0, tmp_path)
    save(tmp_path / "older", other.model, other.optimizer, iteration=1)
    with AsyncSaver(tmp_path / "saves", files=gate) as saver:
        way(saver, program)
        assert gate.is_shut.wait(120.0)  # a byte is on its way to the disk, and none is there
        change(program)
        gate.opened.set()
    tensors = program.tensors()
    assert [name for name in changed if bool((tensors[name] == 2.0).all())] == []
    found = Program(0.0, tmp_path)
    load(tmp_path / "saves", found.model, found.optimizer)
    assert {name: tensor.unique().tolist() for name, tensor in found.tensors().items()} == {
        name: [2.0] for name in tensors
    }


def test_a_save_whose_copying_was_interrupted_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, gate = {name: torch.ones(1000) for name in "ab"}, Gate(0)

    def interrupt(snapshot: Snapshot) -> None:
        assert gate.is_shut.wait(120.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(Snapshot, "release", interrupt)
    saver = AsyncSaver(tmp_path, files=gate)
    with pytest.raises(KeyboardInterrupt):
        saver.save_state_dict(1, tensors)
    for tensor in tensors.values():
        tensor.fill_(2.0)
    gate.opened.set()
    saver.close()  # the interrupt was the caller's to handle
    assert latest(tmp_path) is None
    assert not list(tmp_path.glob("*iter_*"))
