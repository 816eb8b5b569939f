"""Random states of random programs, modules and optimizers come back as they were at the save, or a key is named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.random_programs import Case, case_of, try_cases
from tests.profiles import SEED, nightly, slow
from tests.states import differences


def test_a_program_goes_on_with_equal_bits_or_a_key_is_named(tmp_path: Path) -> None:
    pairs = [(1, 2), (2, 1), (2, 2)]
    sharded = [Case(f"4/{number}", "", pair, ("fsdp", "fsdp")) for number, pair in enumerate(pairs)]
    cases = [*(case_of(3, n) for n in range(24)), *sharded, *(case_of(5, n, ranks=2) for n in range(18))]
    problems, outcomes = try_cases(cases, tmp_path)
    assert problems == []
    assert outcomes["equal"] >= 24, outcomes


@pytest.mark.parametrize(("seed", "count"), [slow(28, 10), nightly(SEED, 300)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_further_ones_of_every_installed_package(tmp_path: Path, seed: int, count: int, ranks: int) -> None:
    problems, outcomes = try_cases([case_of(seed, number, ranks=ranks) for number in range(2 * count)], tmp_path)
    print(dict(outcomes))
    assert problems == []


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
