"""A process that dies at any call to the file system loses nothing. `tests/crash/matrix.py` kills at all of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from reprise.files import Files
from reprise.loading.blocks import blocks_of
from reprise.reading import open_checkpoint, read_places
from tests.crash.hosts import require_mounts
from tests.crash.killing import AFTER, BEFORE
from tests.crash.matrix import HostTrial, Scenario, Trial, sample, scenarios, trial_of

NAMES = [scenario.name for scenario in scenarios(Path())]

# The gate has one scenario of each kind at many calls; the others have fewer kills there, or are left to the soak.
GATED = ("2 ranks, max_checkpoint_keep=1", "2 hosts, copies=1", "library, 2 ranks")


def kill_some(folder: Path, name: str, count: int) -> None:
    (scenario,) = [scenario for scenario in scenarios(folder) if scenario.name == name]
    if scenario.plan.copies is not None:
        require_mounts()
    trial = trial_of(scenario)
    assert len(trial.calls[0]) > 200
    broken = {case: found for case in sample(trial.cases(), count) if (found := trial.run(*case))}
    assert broken == {}


@pytest.mark.parametrize(("name", "count"), [(NAMES[0], 6), (NAMES[3], 6), ("library, 2 ranks", 3)])
def test_a_kill_at_some_calls_is_survived(tmp_path: Path, name: str, count: int) -> None:
    kill_some(tmp_path, name, count)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1 rank, weights alone too", "rewind, 1 rank", "saved again, 1 rank"])
def test_a_kill_of_a_longer_run_is_survived(tmp_path: Path, name: str) -> None:
    kill_some(tmp_path, name, 6)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in GATED else [pytest.mark.nightly]) for n in NAMES])
def test_a_kill_at_many_calls_is_survived(tmp_path: Path, name: str) -> None:
    kill_some(tmp_path, name, 24 if "1 rank" in name else 12)


@pytest.mark.slow
@pytest.mark.nightly
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


@pytest.mark.slow
@pytest.mark.nightly
def test_a_kill_at_every_rename_of_a_replaced_checkpoint(tmp_path: Path) -> None:
    (scenario,) = [found for found in scenarios(tmp_path) if found.name == "saved again, 1 rank"]
    trial = Trial(scenario)
    renames = [at for at, name in enumerate(trial.calls[0]) if name == "rename"]
    assert len(renames) > 4
    broken = {(at, when): found for at in renames for when in (BEFORE, AFTER) if (found := trial.run(0, at, when))}
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


class BlindHosts(HostTrial):
    """A trial of two hosts, one of which is left as a check must see it."""

    def spoil(self, name: str) -> None:
        """Do to the disk of the second host what must never happen."""
        disk = self._disk(1)
        path = disk.iteration(4)
        if name == "a flipped byte":
            checkpoint = open_checkpoint(path, Files())
            assert checkpoint.host is not None
            block = next(blocks_of(checkpoint, read_places(checkpoint), checkpoint.host.own))
            start, _, _ = next(block.packed.spans(block.lo, block.hi))
            data = bytearray((path / block.place.file).read_bytes())
            data[block.place.offset + start] ^= 1
            (path / block.place.file).write_bytes(data)
        elif name == "a lost checkpoint":
            path.rename(disk.root / "elsewhere")
        elif name == "a leftover":
            (disk.root / ".iter_0000003.n-1.partial").mkdir()
        else:
            self._plan.beside("resumed").write_text("3")


def test_the_checks_of_two_hosts_see_what_must_not_be(tmp_path: Path) -> None:
    (scenario,) = [found for found in scenarios(tmp_path) if found.name == NAMES[-1]]
    require_mounts()
    trial = BlindHosts(scenario)
    root, kept = scenario.plan.root, tmp_path / "kept"
    shutil.copytree(root, kept)
    assert trial._after_the_end() == []
    assert trial._after_the_kill() == []
    # What is committed on the first host alone, and not prepared on the second, is lost.
    trial.spoil("a lost checkpoint")
    assert len(trial._after_the_kill()) == 1
    trial._newest = 0
    for name in ("a flipped byte", "a lost checkpoint", "a leftover", "an older resume"):
        shutil.rmtree(root)
        shutil.copytree(kept, root)
        assert trial._after_the_end() == []
        trial.spoil(name)
        assert len(trial._after_the_end()) >= 1, name
