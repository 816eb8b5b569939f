"""Random configurations, interrupted at random moments: three in the gate, nine in all tests, new ones at night."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.profiles import SEED, slow
from tests.resume.differential import case_of, differences, rows_of, run_case

PINNED = 28


@pytest.mark.parametrize("number", [0, 1, 2, *map(slow, range(7, 13))])
def test_an_interrupted_run_leaves_what_the_unbroken_one_leaves(number: int, tmp_path: Path) -> None:
    case = case_of(PINNED, number, ranks=1 if number < 3 else 4)
    assert run_case(case, tmp_path) == [], str(case)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert len(rows_of(whole / "run")) >= 6  # and what is compared is seen
    for path in (broken / "run/checkpoints").glob("iter_*/trainer_state.json"):
        path.write_text(path.read_text().replace('"consumed_tokens": ', '"consumed_tokens": 1'))
    assert "consumed_tokens" in " ".join(differences(case, whole, broken))


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(300))
def test_it_does_so_for_300_random_configurations(number: int, tmp_path: Path) -> None:
    case = case_of(SEED, number)
    assert run_case(case, tmp_path) == [], str(case)
