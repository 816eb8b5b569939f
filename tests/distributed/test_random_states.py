"""Random states of random programs come back as they were at the save, or a key is named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.random_states import case_of, differences, main, try_cases


def test_a_state_comes_back_or_its_key_is_named(tmp_path: Path) -> None:
    problems, outcomes = try_cases([case_of(5, number, ranks=2) for number in range(12)], tmp_path)
    assert problems == []
    assert outcomes["equal"] >= 6, outcomes


@pytest.mark.slow
@pytest.mark.nightly
def test_three_hundred_states_on_up_to_four_ranks() -> None:
    assert main(["--cases", "300"]) == 0


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
