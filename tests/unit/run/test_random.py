"""Randomness is a function of what it is for."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.config import Initial, InitialKind
from reprise.format import Box, StoredDtype, TensorKind, TensorSpec
from reprise.tensors import LiveTensor
from tests.profiles import examples
from trainer.run.random import dropout_key, fill_initial_values

NORMAL = Initial(InitialKind.normal, 0.02)


def filled(shape: tuple[int, ...], box: Box, *, name: str = "w", seed: int = 1, rule: Initial = NORMAL) -> torch.Tensor:
    """Return what a rank that holds `box` draws."""
    local = torch.full(box.shape, torch.nan)
    spec = TensorSpec(TensorKind.MODEL, name, shape, StoredDtype.F32, shape)
    fill_initial_values([LiveTensor(spec, box, local, (0,))], {name: rule}, seed)
    return local


def drawn(*shape: int, name: str = "w", seed: int = 1, rule: Initial = NORMAL) -> torch.Tensor:
    return filled(shape, Box((0,) * len(shape), shape), name=name, seed=seed, rule=rule)


@examples(50)
@given(st.integers(1, 200), st.integers(1, 7), st.data())
def test_every_box_is_cut_from_the_same_values(rows: int, columns: int, data: st.DataObject) -> None:
    whole = drawn(rows, columns)
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    height, width = data.draw(st.integers(0, rows - row)), data.draw(st.integers(0, columns - column))
    part = filled((rows, columns), Box((row, column), (height, width)))
    assert torch.equal(part, whole[row : row + height, column : column + width])


def test_values_are_normal_with_the_asked_deviation() -> None:
    values = drawn(1000, 100)
    # 1e5 draws: the deviation is known to 0.2 %, the mean to 0.3 % of it.
    assert float(values.std()) == pytest.approx(0.02, rel=0.01)
    assert abs(float(values.mean())) < 0.01 * 0.02
    assert float((values.abs() < 0.02).float().mean()) == pytest.approx(0.6827, abs=0.01)


def test_zeros_ones_vectors_and_wider_tensors() -> None:
    assert not drawn(5, 3, rule=Initial(InitialKind.zeros)).any()
    assert bool((drawn(5, rule=Initial(InitialKind.ones)) == 1).all())
    assert torch.equal(filled((70, 3, 4), Box((60, 0, 2), (10, 3, 2))), drawn(70, 3, 4)[60:, :, 2:])


def test_a_dropout_key_depends_on_all_coordinates_and_fits_int64() -> None:
    places = list(itertools.product(range(3), repeat=3))
    keys = {dropout_key(seed, iteration, micro_batch=number) for seed, iteration, number in places}
    assert len(keys) == len(places)
    assert all(0 <= key < 2**63 for key in keys)
    assert dropout_key(1234, 1, micro_batch=0) == dropout_key(1234, 1, micro_batch=0)


def test_uniform_values_fill_their_interval_and_no_more() -> None:
    values = drawn(64, 300, rule=Initial(InitialKind.uniform, 0.25))
    assert values.abs().max() <= 0.25
    assert values.min() < -0.24
    assert values.max() > 0.24
    assert abs(float(values.mean())) < 0.005
