"""`reprise.diff`: tensors bit by bit, state field by field."""

from __future__ import annotations

from pathlib import Path

import torch

import reprise
from reprise import FieldDifference, TensorDifference
from reprise.errors import CheckpointError
from tests.local_folders import save_on_two_hosts
from tests.messages import refused


def save(folder: Path, **state: object) -> Path:
    reprise.save_state_dict(folder, state, iteration=1)
    return folder


def test_checkpoints_of_the_same_state_have_no_difference(tmp_path: Path) -> None:
    a, b = (save(tmp_path / name, w=torch.full((2,), torch.nan), epoch=1) for name in "ab")
    counts: list[tuple[int, int]] = []
    difference = reprise.diff(a, b, progress=lambda _, count, total: counts.append((count, total)))
    assert (difference.is_empty, difference.equal_tensors, difference.state) == (True, 1, ())
    assert counts == [(0, 1), (1, 1)]


def test_tensors_and_fields_that_differ_are_listed(tmp_path: Path) -> None:
    a = save(tmp_path / "a", w=torch.tensor([0.0, 1.0]), same=torch.ones(1), old=torch.ones(1), epoch=1)
    b = save(tmp_path / "b", w=torch.tensor([-0.0, 3.0]), same=torch.ones(1), new=torch.ones(1), epoch=2)
    difference = reprise.diff(a, b / "iter_0000001")
    assert not difference.is_empty
    assert difference.tensors == (
        TensorDifference("/new", "only in B"),
        TensorDifference("/old", "only in A"),
        TensorDifference("/same", "equal", 0.0, 0, 1),
        TensorDifference("/w", "values", 2.0, 2, 2),
    )
    assert FieldDifference("state_dict.values./epoch", 1, 2) in difference.state


def test_a_piece_on_another_host_is_refused(tmp_path: Path) -> None:
    a, b = save_on_two_hosts(tmp_path, 2)
    with refused(CheckpointError, str(a)):
        reprise.diff(a, b)
