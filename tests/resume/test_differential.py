"""Random configurations, interrupted at random moments: `python -m tests.resume.differential` tries more of them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from tests.resume.differential import Refused, case_of, differences, rows_of, run_case, tensor_case_of

SEED = 28
IN_THE_GATE = (0,)


@pytest.mark.parametrize("number", IN_THE_GATE)
def test_an_interrupted_run_leaves_what_the_unbroken_one_leaves(number: int, tmp_path: Path) -> None:
    case = case_of(SEED, number, ranks=1)
    assert run_case(case, tmp_path) == [], str(case)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert len(rows_of(whole / "run")) >= 6  # and what is compared is seen
    for path in (broken / "run/checkpoints").glob("iter_*/trainer_state.json"):
        path.write_text(path.read_text().replace('"consumed_tokens": ', '"consumed_tokens": 1'))
    assert "consumed_tokens" in " ".join(differences(case, whole, broken))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 300, 10))
def test_it_does_so_for_300_random_configurations(first: int, tmp_path: Path) -> None:
    for number in range(first, first + 10):
        case = case_of(SEED, number)
        assert run_case(case, tmp_path / str(number)) == [], str(case)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 200, 10))
def test_moved_shards_equal_one_process_or_are_refused(first: int, tmp_path: Path) -> None:
    for number in range(first, first + 10):
        case = tensor_case_of(SEED, number)
        with suppress(Refused):
            assert run_case(case, tmp_path / str(number)) == [], str(case)
