"""The figures of a small state's saves and loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench import small_states


def test_a_ratio_is_that_of_a_round() -> None:
    rounds = [
        {"save_state_dict": 0.010, "DCP save": 0.020, "load_state_dict": 0.004, "DCP load": 0.004},
        {"save_state_dict": 0.060, "DCP save": 0.040, "load_state_dict": 0.004, "DCP load": 0.008},
        {"save_state_dict": 0.020, "DCP save": 0.080, "load_state_dict": 0.006, "DCP load": 0.004},
    ]
    head, save, *_, load, _ = small_states.summary(rounds)
    assert head == "3 rounds."
    assert save.split() == ["save_state_dict", "20.0", "ms", "0.50", "of", "DCP", "save"]
    assert load.split()[:4] == ["load_state_dict", "4.0", "ms", "1.00"]


@pytest.mark.nightly
def test_two_ranks_take_turns_with_dcp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_states.main(["--folder", str(tmp_path), "--ranks", "2", "--rounds", "1"])
    assert capsys.readouterr().out.startswith("1 rounds.\nsave_state_dict")
    assert list(tmp_path.iterdir()) == []
