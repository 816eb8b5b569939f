"""Random modules and optimizers go on with equal bits in fresh ones, or a key is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.random_modules import Case, case_of, main, try_cases


def test_fresh_ones_go_on_with_equal_bits_or_name_a_key(tmp_path: Path) -> None:
    problems, outcomes = try_cases([case_of(3, number) for number in range(30)], tmp_path)
    assert problems == []
    assert outcomes["equal"] >= 15, outcomes


def test_shards_go_on_with_equal_bits_or_name_a_key(tmp_path: Path) -> None:
    sharded = [Case(f"4/{number}", "", ranks, is_sharded=True) for number, ranks in enumerate([(1, 2), (2, 1), (2, 2)])]
    problems, outcomes = try_cases([*sharded, *(case_of(5, number, ranks=2) for number in range(6))], tmp_path)
    assert problems == []
    assert outcomes["equal"] >= 4, outcomes


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_three_hundred_of_every_installed_package(ranks: str) -> None:
    assert main(["--cases", "300", "--ranks", ranks]) == 0
