"""The tensors of the last save, which the next one enumerates again only if one of them is another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from reprise.errors import CheckpointError
from reprise.format.layout import TensorSpec
from reprise.nested import held
from reprise.nested.held import HeldTensors, LastTensors
from reprise.nested.table import JointTable, join
from reprise.nested.tree import Tree, tree_of_dict
from reprise.tensors.live import LiveTensor

State = dict[str, Any]


def state() -> State:
    tied = torch.arange(6.0)
    return {"a": tied, "b": {"tied": tied, "square": torch.arange(20.0).reshape(5, 4)[:4]}, "epoch": 1}


class OneRank:
    """Keeps the joint table as an agreement does, for as long as the table is the same."""

    def __init__(self) -> None:
        self.last, self.tables = LastTensors(), dict[bytes, JointTable]()

    def take(self, given: State) -> tuple[LiveTensor, ...]:
        """Take a state dict as a save of one rank does."""
        table = self.last.table_of(tree_of_dict(given), (), is_replicated=False)
        return self.last.shared(self.tables.setdefault(table, JointTable.from_text(join({0: table}))), 0)


def values_of(live: Iterable[LiveTensor]) -> dict[TensorSpec, object]:
    return {tensor.spec: tensor.local.tolist() for tensor in live}


@pytest.fixture
def enumerated(monkeypatch: pytest.MonkeyPatch) -> list[Tree]:
    """Return the trees that are enumerated."""
    trees, local_tensors = [], held.local_tensors

    def count(tree: Tree, *args: Any, **options: Any) -> HeldTensors:
        trees.append(tree)
        return local_tensors(tree, *args, **options)

    monkeypatch.setattr(held, "local_tensors", count)
    return trees


def test_tensors_that_stay_are_enumerated_once(enumerated: list[Tree]) -> None:
    last, given = OneRank(), state()
    first = last.take(given)
    given["a"] += 1
    given["epoch"] = 2
    assert last.take(given) is first
    assert len(enumerated) == 1
    given["more"] = 2  # another table of the same tensors
    last.take(given)
    assert {"/epoch", "/more"} in [joint.values for joint in last.tables.values()]


def untie(given: State) -> None:
    given["b"]["tied"] = given["a"].clone()


def move(given: State) -> None:
    given["b"]["square"].data = given["b"]["square"] + 1


def rename(given: State) -> None:
    given["c"] = given.pop("a")


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda square: square.as_strided((4, 4), (4, 1), 4),
    lambda square: square.T,
    torch._neg_view,
    lambda square: square.view(torch.int32),
]


@pytest.mark.parametrize("change", [untie, move, rename, *VIEWS])
def test_a_change_is_enumerated(enumerated: list[Tree], change: Callable[[Any], Any]) -> None:
    last, given = OneRank(), state()
    first = last.take(given)
    if change in VIEWS:
        given["b"]["square"] = change(given["b"]["square"])
    else:
        change(given)
    with contextlib.suppress(CheckpointError):  # a negative view may be refused
        assert (live := last.take(given)) is not first
        expected = held.local_tensors(tree_of_dict(given)).live
        assert values_of(live) == values_of(expected.values())
    assert len(enumerated) >= 2
