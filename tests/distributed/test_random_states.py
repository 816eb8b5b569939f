"""Random states of random programs, modules and optimizers come back as they were at the save, or a key is named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import random_modules, random_states
from tests.profiles import SEED
from tests.states import differences


def test_a_state_comes_back_or_its_key_is_named(tmp_path: Path) -> None:
    cases = [random_states.case_of(5, number, ranks=2) for number in range(12)]
    problems, outcomes = random_states.try_cases(cases, tmp_path)
    assert problems == []
    assert outcomes["equal"] >= 6, outcomes


def test_fresh_modules_go_on_with_equal_bits_or_name_a_key(tmp_path: Path) -> None:
    problems, outcomes = random_modules.try_cases([random_modules.case_of(3, n) for n in range(30)], tmp_path)
    assert problems == []
    assert outcomes["equal"] >= 15, outcomes


def test_shards_go_on_with_equal_bits_or_name_a_key(tmp_path: Path) -> None:
    ranks = [(1, 2), (2, 1), (2, 2)]
    sharded = [random_modules.Case(f"4/{number}", "", pair, is_sharded=True) for number, pair in enumerate(ranks)]
    cases = [*sharded, *(random_modules.case_of(5, number, ranks=2) for number in range(6))]
    problems, outcomes = random_modules.try_cases(cases, tmp_path)
    assert problems == []
    assert outcomes["equal"] >= 4, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_twenty_further_ones(tmp_path: Path, ranks: int) -> None:
    try_cases(28, 20, ranks, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_three_hundred_of_every_installed_package(tmp_path: Path, ranks: int) -> None:
    try_cases(SEED, 300, ranks, tmp_path)


def try_cases(seed: int, count: int, ranks: int, folder: Path) -> None:
    """Try so many states on up to so many ranks, and as many modules on one or two."""
    states = [random_states.case_of(seed, number, ranks=ranks) for number in range(count)]
    modules = [random_modules.case_of(seed, number, ranks=min(ranks, 2)) for number in range(count)]
    for name, (problems, outcomes) in (
        ("states", random_states.try_cases(states, _new(folder / "states"))),
        ("modules", random_modules.try_cases(modules, _new(folder / "modules"))),
    ):
        print(name, dict(outcomes))
        assert problems == []


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("expected", "value"),
    [
        (0.0, -0.0),
        (1, True),
        ((1, 2), [1, 2]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1: 2}, {True: 2}),
        (torch.zeros(1), -torch.zeros(1)),
        (torch.zeros(1), torch.zeros(1, dtype=torch.float64)),
        (torch.ones(1, 2), torch.ones(2)),
        (math.inf, -math.inf),
        ([1], [1, 2]),
    ],
)
def test_states_that_differ_are_seen(expected: Any, value: Any) -> None:
    assert differences({"a": [expected]}, {"a": [value]}, "")
    assert not differences({"a": [expected]}, {"a": [expected]}, "")
