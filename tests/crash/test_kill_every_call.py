"""A process that dies at any call to the file system loses nothing. `tests/crash/matrix.py` kills at all of them.

A day's gate has a few scenarios and kinds of calls, by the date, and a week's has all; `make test-all` all scenarios
and a third of the kinds of calls. REPRISE_SEED=20261128 repeats a day's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.crash.hosts import require_mounts
from tests.crash.matrix import Case, Trial, drawn, scenarios, trial_of
from tests.profiles import SEED, day

NAMES = [scenario.name for scenario in scenarios(Path())]
DAYS = 7


def prepared(folder: Path, name: str) -> Trial:
    """Prepare a scenario by its name."""
    folder.mkdir(exist_ok=True)
    (scenario,) = [scenario for scenario in scenarios(folder) if scenario.name == name]
    if scenario.plan.copies is not None:
        require_mounts()
    return trial_of(scenario)


def kill(trial: Trial, cases: Sequence[Case]) -> None:
    print(f"REPRISE_SEED={SEED}: {trial.scenario.name}, {cases}")
    assert len(trial.calls[0]) > 200
    assert {case: found for case in cases if (found := trial.run(*case))} == {}


def test_the_kills_of_the_day_are_survived(tmp_path: Path) -> None:
    week, number = divmod(day(), DAYS)
    for name in NAMES[number::DAYS]:
        trial = prepared(tmp_path / name, name)
        kill(trial, drawn(trial, week + number, DAYS))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_kill_at_a_kind_of_call_is_survived(tmp_path: Path, name: str) -> None:
    trial = prepared(tmp_path, name)
    kill(trial, drawn(trial, day(), 3))


@pytest.mark.slow
@pytest.mark.nightly
def test_a_kill_at_every_call_is_survived(tmp_path: Path) -> None:
    trial = prepared(tmp_path, NAMES[day() % len(NAMES)])
    kill(trial, trial.cases())
