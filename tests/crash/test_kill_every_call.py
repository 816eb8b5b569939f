"""A process that dies at any call to the file system loses nothing. `tests/crash/matrix.py` kills at all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.killing import AFTER
from tests.crash.matrix import Scenario, Trial, sample, scenarios, trial_of

NAMES = [scenario.name for scenario in scenarios(Path())]


def kill_some(folder: Path, name: str, count: int) -> None:
    (scenario,) = [scenario for scenario in scenarios(folder) if scenario.name == name]
    trial = trial_of(scenario)
    assert len(trial.calls[0]) > 200
    broken = {case: found for case in sample(trial.cases(), count) if (found := trial.run(*case))}
    assert broken == {}


@pytest.mark.parametrize("name", [NAMES[0], NAMES[3], NAMES[-1]])
def test_a_kill_at_some_calls_is_survived(tmp_path: Path, name: str) -> None:
    kill_some(tmp_path, name, 6)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_kill_at_many_calls_is_survived(tmp_path: Path, name: str) -> None:
    kill_some(tmp_path, name, 24 if "1 rank" in name else 12)


@pytest.mark.slow
def test_a_kill_at_every_call_of_a_rewind_is_survived(tmp_path: Path) -> None:
    (scenario,) = [found for found in scenarios(tmp_path) if found.name == "rewind, 1 rank"]
    trial = Trial(scenario)
    calls = trial.calls[0]
    # From the first checkpoint that is renamed out of the way to the first folder of a new one. In between lie the
    # tracker, the abandoned lines' side file and the metrics without them; the one folder made there is the run's.
    first = calls.index("rename")
    recording = calls.index("mkdir", first)
    end = calls.index("mkdir", recording + 1)
    assert calls[first:end].count("rename") >= 5
    cases = [case for case in trial.cases() if first <= case[1] < end and case[2] != AFTER]
    assert len(cases) > end - first
    broken = {case: found for case in cases if (found := trial.run(*case))}
    assert broken == {}


class Blind(Trial):
    """A trial whose run leaves something that a check must see."""

    def spoil(self, name: str) -> None:
        """Do to the run's folder what must never happen."""
        root = self._plan.checkpoints
        if name == "a flipped byte":
            path = next(root.glob("iter_0000004/model.safetensors"))
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        elif name == "a lost checkpoint":
            (root / "iter_0000004").rename(root / "elsewhere")
        elif name == "a leftover":
            (root / ".iter_0000003.n-1.partial").mkdir()
        elif name == "an old tracker":
            (root / "latest_checkpointed_iteration.txt").write_text("3\n")
        else:
            path = self._plan.root / "metrics.jsonl"
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def test_the_checks_see_what_must_not_be(tmp_path: Path) -> None:
    (scenario,) = [found for found in scenarios(tmp_path) if found.name == NAMES[0]]
    assert isinstance(scenario, Scenario)
    for name in ("a flipped byte", "a lost checkpoint", "a leftover", "an old tracker", "a lost line"):
        trial = Blind(scenario)
        assert trial._after_the_end() == []
        trial.spoil(name)
        assert len(trial._after_the_end()) >= 1, name
