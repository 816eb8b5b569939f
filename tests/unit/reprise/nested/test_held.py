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
from reprise.nested.module_tree import tree_of_dict
from reprise.nested.table import JointTable, Table, join
from reprise.nested.tree import Tree
from reprise.tensors.live import LiveTensor

State = dict[str, Any]


def state() -> State:
    tied = torch.arange(6.0)
    return {"a": tied, "b": {"tied": tied, "square": torch.arange(20.0).reshape(5, 4)[:4]}, "epoch": 1}


class OneRank(LastTensors):
    """Keeps the joint table as an agreement does, for as long as the table is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, tuple[Table, JointTable]] = {}

    def take(self, given: State) -> tuple[LiveTensor, ...]:
        """Take a state dict as a save of one rank does."""
        table = self.table_of(tree_of_dict(given), (), is_replicated=False)
        _, joint = self.tables.setdefault(id(table), (table, join({0: table})))
        return self.shared(joint, 0, ())


def values_of(live: Iterable[LiveTensor]) -> dict[TensorSpec, object]:
    return {tensor.spec: tensor.local.tolist() for tensor in live}


def move(given: State) -> None:
    given["b"]["square"].data = given["b"]["square"] + 1


def shift(given: State) -> None:
    given["b"]["square"] = given["b"]["square"].as_strided((4, 4), (4, 1), 4)


def turn(given: State) -> None:
    given["b"]["square"] = given["b"]["square"].T


def negate(given: State) -> None:
    given["b"]["square"] = torch._neg_view(given["b"]["square"])


def rename(given: State) -> None:
    given["c"] = given.pop("a")


def untie(given: State) -> None:
    given["b"]["tied"] = given["a"].clone()


def reinterpret(given: State) -> None:
    given["b"]["square"] = given["b"]["square"].view(torch.int32)


CHANGES = [move, shift, turn, negate, rename, untie, reinterpret]


@pytest.fixture
def enumerated(monkeypatch: pytest.MonkeyPatch) -> list[Tree]:
    """Return the trees that are enumerated."""
    trees, local_tensors = [], held.local_tensors

    def count(tree: Tree) -> HeldTensors:
        trees.append(tree)
        return local_tensors(tree)

    monkeypatch.setattr(held, "local_tensors", count)
    return trees


def test_tensors_that_stay_are_enumerated_once(enumerated: list[Tree]) -> None:
    last, given = OneRank(), state()
    first = last.take(given)
    given["a"] += 1
    given["epoch"] = 2
    assert last.take(given) is first
    assert len(enumerated) == 1


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_enumerated(enumerated: list[Tree], change: Callable[[State], None]) -> None:
    last, given = OneRank(), state()
    first = last.take(given)
    change(given)
    with contextlib.suppress(CheckpointError):  # a negative view may be refused
        assert last.take(given) is not first
        expected = held.local_tensors(tree_of_dict(given)).live
        assert values_of(last.live) == values_of(expected.values())
    assert len(enumerated) >= 2


def test_a_new_value_makes_another_table(enumerated: list[Tree]) -> None:
    last, given = OneRank(), state()
    last.take(given)
    given["more"] = 2
    last.take(given)
    assert last.table.values == ("/epoch", "/more")
    assert len(enumerated) == 1
